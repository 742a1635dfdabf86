"""`bigtrain tokenize` of JSON lines from a disk, a web server and an S3 server whose lines break.

All three on this machine, whose cores they share with the tokenizing: the result is that of a
network that is not a limit. The connection to each server is dropped twice while the file is read.
The tokens must be the same bytes; the seconds of the full command, start-up included, take turns.
Before each the file is read once, so that nobody waits for the disk.

    python benchmarks/remote_input.py [--megabytes 1000] [--rounds 3] [--workers 2]
        [--input FILE.jsonl] [--tokenizer DIR]

The text is this machine's own, repeated until there is as much as was asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import orjson

from benchmarks.support.machine_texts import machine_texts
from bigtrain.data.tokenizers.training import train_tokenizer
from tests.support.remote_servers import S3_VARIABLES, BreakingLine, WebServer, s3_server

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("disk", "http", "s3")
AIM = 0.8


@dataclass(frozen=True)
class Turn:
    """One command: its seconds on the clock and of the processor (its own, not the server's), its
    tokens, and a checksum of every shard it wrote."""

    seconds: float
    cpu_seconds: float
    tokens: int
    shards: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        file = work / "server/bucket/text.jsonl"
        file.parent.mkdir(parents=True)
        texts = machine_texts(int(min(args.megabytes, 300) * 1e6))
        if args.input is None:
            write(file, texts, int(args.megabytes * 1e6))
        else:
            file.symlink_to(args.input.resolve())
        tokenizer = args.tokenizer or work / "tokenizer"
        if args.tokenizer is None:
            tokenizer.mkdir()
            train_tokenizer([texts[:2000]], args.vocab_size).save(tokenizer)
        del texts
        compare(file, tokenizer, work / "out", args.rounds, args.workers)


def write(file: Path, texts: list[str], num_bytes: int) -> None:
    with file.open("wb") as target:
        while target.tell() < num_bytes:
            for text in texts:
                target.write(orjson.dumps({"text": text}) + b"\n")
                if target.tell() >= num_bytes:
                    return


def compare(file: Path, tokenizer: Path, output: Path, rounds: int, workers: str) -> None:
    turns: dict[str, list[Turn]] = {place: [] for place in PLACES}
    breaks = tuple(file.stat().st_size * part // 10 for part in (3, 6))
    for number in range(rounds):
        for place in (*PLACES[number % 3 :], *PLACES[: number % 3]):  # none is always the first
            with file.open("rb") as opened:  # from memory afterwards
                while opened.read(1 << 24):
                    pass
            turns[place].append(run(place, file, tokenizer, output, breaks, workers))
    shards = {turn.shards for runs in turns.values() for turn in runs}
    if len(shards) != 1:
        raise SystemExit("not the same bytes")
    size = file.stat().st_size / 1e6
    print(f"{size:,.0f} MB of JSON lines, {workers} workers, each line broken twice: same bytes")
    rates = {p: median(turn.tokens / turn.seconds for turn in turns[p]) for p in PLACES}
    for place in PLACES:
        seconds = sorted(turn.seconds for turn in turns[place])
        print(
            f"{place:>5}: {rates[place] / 1e6:6.2f}M tokens/s, {size / median(seconds):6.1f} MB/s, "
            f"{median(seconds):.1f} s ({seconds[0]:.1f} .. {seconds[-1]:.1f}), "
            f"{median(turn.cpu_seconds for turn in turns[place]):.1f} s of processor"
        )
    for place in PLACES[1:]:
        print(f"ratio {place} / disk: {rates[place] / rates['disk']:.2f} x (aim {AIM} x)")


def run(
    place: str, file: Path, tokenizer: Path, output: Path, breaks: tuple[int, ...], workers: str
) -> Turn:
    shutil.rmtree(output, ignore_errors=True)
    with ExitStack() as stack:
        name, line, environment = str(file), None, {}
        if place != "disk":
            root = file.parents[1]
            server = s3_server(root) if place == "s3" else WebServer(root).running()
            line = BreakingLine(stack.enter_context(server), breaks)
            port = stack.enter_context(line.running())
            server_address = f"http://127.0.0.1:{port}"
            name = f"{server_address}/bucket/text.jsonl"
            if place == "s3":
                name = "s3://bucket/text.jsonl"
                environment = {**S3_VARIABLES, "AWS_ENDPOINT_URL": server_address}
        words = [sys.executable, "-m", "bigtrain.cli", "tokenize", "--input", name]
        words += ["--tokenizer", str(tokenizer), "--output", str(output), "--workers", workers]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **environment, "PYTHONPATH": path}
        begun, spent = time.perf_counter(), cpu_seconds_of_children()
        result = subprocess.run(words, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        cpu_seconds = cpu_seconds_of_children() - spent
    if result.returncode:
        raise SystemExit(f"{' '.join(words)}: {result.stderr[-3000:]}")
    if line is not None and line.broken != len(breaks):
        raise SystemExit(f"{place}: broken {line.broken} times, not {len(breaks)}")
    match = re.search(r"([\d,]+) tokens here", result.stdout)
    assert match is not None, result.stdout
    digest = hashlib.sha256()
    for shard in sorted(output.glob("*.bin")) + sorted(output.glob("*.idx")):
        digest.update(shard.name.encode())
        with shard.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return Turn(seconds, cpu_seconds, int(match[1].replace(",", "")), digest.hexdigest())


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
