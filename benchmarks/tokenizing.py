"""Speed of `bigtrain tokenize`, as ratios within one run on one machine.

Not called tokenize.py: a script there would hide the standard library's module of that name.

In MB of text per second on the clock, and per CPU second (user and system, of all threads and child
processes), which other work on the machine disturbs least: the full command in a fresh process, of
JSON lines and of parquet, the same without its start-up (measured on one document), its own encoder
by itself on all cores on text already in memory, in a fresh process as well (all of it in one call,
and in batches that stay in a processor's cache), the same encoder with orjson parsing each line
before (the lower bound of any reader of lines in Python), the reference encoder by itself, the
command with the reference encoder, and Megatron-LM's script where a checkout is given. Contenders
take turns, the median of the rounds counts. Then the ratios, and the peak memory.

The text is this machine's own, each file once: an encoder takes what it has seen before from its
cache, and is several times as fast on text that repeats.

    python benchmarks/tokenizing.py [--megabytes 500] [--input FILE.jsonl] [--tokenizer DIR]
        [--megatron MEGATRON_LM]   # what it needs to be imported is PYTHONPATH's affair
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import pyarrow
from pyarrow import parquet

from benchmarks.support.machine_texts import machine_texts
from bigtrain.data.tokenizers.encoders import Encoder
from bigtrain.data.tokenizers.equivalence import choose_encoder
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.data.tokenizers.training import train_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cost:
    """CPU seconds, seconds on the clock, and the peak memory of a command's largest process."""

    cpu_s: float
    wall_s: float
    peak_mb: float = 0.0


# The peak of a process counts what the process it was forked from had, which here is all the text.
RUN = """
import json, os, resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000]))
"""


def run_command(words: Sequence[str], **environment: str) -> Cost:
    """Return `words` as a process, with its children. Raises RuntimeError where it fails."""
    started_at = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", RUN, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    status, cpu_s, peak_mb = json.loads(result.stdout)
    if status:
        raise RuntimeError(f"{words}: {result.stderr[-3000:]}")
    return Cost(cpu_s, time.perf_counter() - started_at, peak_mb)


@dataclass(frozen=True)
class Commands:
    """Contenders, on any file of lines."""

    tokenizer: Path
    directory: Path
    megatron: Path | None

    def bigtrain(self, source: Path, encoder: str) -> Cost:
        output = self.directory / "out"
        shutil.rmtree(output, ignore_errors=True)
        words = [sys.executable, "-m", "bigtrain.cli", "tokenize", "--input", str(source)]
        words += ["--tokenizer", str(self.tokenizer), "--output", str(output)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return run_command([*words, "--encoder", encoder], PYTHONPATH=path)

    def alone(self, source: Path, encoder: Encoder, form: str) -> Cost:
        """Return `encoder`'s library as benchmarks/support/encoder_alone.py describes `form`."""
        script = ROOT / "benchmarks" / "support" / "encoder_alone.py"
        words = [sys.executable, str(script), str(source), str(self.tokenizer), encoder.library]
        result = subprocess.run([*words, form], stdout=subprocess.PIPE, text=True, check=True)
        return Cost(*json.loads(result.stdout))

    def megatrons(self, source: Path) -> Cost:
        assert self.megatron is not None
        words = [sys.executable, str(self.megatron / "tools" / "preprocess_data.py")]
        words += ["--input", str(source), "--output-prefix", str(self.directory / "megatron")]
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--append-eod", "--workers", "2"]
        return run_command([*words, "--tokenizer-model", str(self.tokenizer)])


def write_lines(path: Path, texts: list[str]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())})
    parquet.write_table(table, path, row_group_size=2000, compression="zstd")
    return path


def megabytes_of(texts: Sequence[str]) -> float:
    return sum(len(text.encode("utf-8")) for text in texts) / 1e6


def first_megabytes(texts: list[str], megabytes: float) -> list[str]:
    size, count = 0, 0
    while count < len(texts) and size < megabytes * 1e6:
        size += len(texts[count].encode("utf-8"))
        count += 1
    return texts[:count]


def measure(args: argparse.Namespace, directory: Path) -> None:
    if args.input:
        with args.input.open(encoding="utf-8") as file:
            texts = first_megabytes([json.loads(line)["text"] for line in file], args.megabytes)
    else:
        texts = machine_texts(int(args.megabytes * 1e6))
    source = write_lines(directory / "in.jsonl", texts)
    table = write_parquet(directory / "in.parquet", texts)
    part = first_megabytes(texts, args.slow_megabytes)
    part_source = write_lines(directory / "part.jsonl", part)
    one = write_lines(directory / "one.jsonl", texts[:1])
    tokenizer = args.tokenizer
    if tokenizer is None:
        tokenizer = directory / "tokenizer"
        train_tokenizer([texts[: max(1, len(texts) // 20)]], args.vocab_size).save(tokenizer)
    os.environ["BIGTRAIN_CACHE"] = str(directory / "cache")  # empty, for the first start
    commands = Commands(tokenizer, directory, args.megatron)
    first = commands.bigtrain(one, args.encoder)
    queue = choose_encoder(load_tokenizer(str(tokenizer)).encoder(), args.encoder)
    print(f"{megabytes_of(texts):.1f} MB of text, {len(texts)} documents, {queue.current.engine()}")
    print(f"{megabytes_of(part):.1f} MB of it for the slow contenders")
    costs = Costs(megabytes_of(texts), megabytes_of(part))
    for _ in range(args.rounds):
        costs.add("start-up", commands.bigtrain(one, args.encoder))
        costs.add("command", commands.bigtrain(source, args.encoder))
        costs.add("command, parquet", commands.bigtrain(table, args.encoder))
        costs.add("encoder, one call", commands.alone(source, queue.current, "one_call"))
        costs.add("encoder, batches", commands.alone(source, queue.current, "batches"))
        costs.add("encoder and JSON", commands.alone(source, queue.current, "parsed_batches"))
        costs.add("reference encoder", commands.alone(part_source, queue.reference, "batches"))
        costs.add("start-up with reference", commands.bigtrain(one, "reference"))
        costs.add("command with reference", commands.bigtrain(part_source, "reference"))
        if args.megatron:
            costs.add("start-up of Megatron's script", commands.megatrons(one))
            costs.add("Megatron's script", commands.megatrons(part_source))
    print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(f"start-up the first time {first.cpu_s:.2f} CPU-s")
    report(costs)


class Costs:
    """The median cost of each contender, of `megabytes` of text or of `part`."""

    def __init__(self, megabytes: float, part: float) -> None:
        self._megabytes, self._part = megabytes, part
        self._rounds: dict[str, list[Cost]] = {}

    def add(self, name: str, cost: Cost) -> None:
        self._rounds.setdefault(name, []).append(cost)

    def __contains__(self, name: str) -> bool:
        return name in self._rounds

    def __getitem__(self, name: str) -> Cost:
        rounds = self._rounds[name]
        return Cost(
            median(cost.cpu_s for cost in rounds),
            median(cost.wall_s for cost in rounds),
            max(cost.peak_mb for cost in rounds),
        )

    def rates(self, name: str, start: str | None = None) -> tuple[float, float]:
        """Return MB of text per second on the clock, and per CPU second; without start-up
        `start`."""
        slow = "reference" in name or "Megatron" in name
        cost = self[name]
        before = Cost(0.0, 0.0) if start is None else self[start]
        # Of very little text the noise of the start-up may be larger than the rest.
        wall_s, cpu_s = cost.wall_s - before.wall_s, cost.cpu_s - before.cpu_s
        megabytes = self._part if slow else self._megabytes
        return megabytes / max(1e-3, wall_s), megabytes / max(1e-3, cpu_s)


def report(costs: Costs) -> None:
    rates = {
        "full command": costs.rates("command"),
        "command after start-up": costs.rates("command", "start-up"),
        "the same, parquet": costs.rates("command, parquet", "start-up"),
        "its encoder only": costs.rates("encoder, one call"),
        "its encoder in batches": costs.rates("encoder, batches"),
        "its encoder and JSON": costs.rates("encoder and JSON"),
        "reference encoder only": costs.rates("reference encoder"),
        "full command, reference": costs.rates("command with reference"),
        "reference after start-up": costs.rates(
            "command with reference", "start-up with reference"
        ),
    }
    compared = [
        ("command after start-up", "its encoder only"),
        ("command after start-up", "its encoder in batches"),
        ("the same, parquet", "its encoder only"),
        ("the same, parquet", "its encoder in batches"),
        ("its encoder and JSON", "its encoder in batches"),
        ("command after start-up", "its encoder and JSON"),
        ("full command", "its encoder only"),
        ("reference after start-up", "reference encoder only"),
    ]
    if "Megatron's script" in costs:
        rates["Megatron's script"] = costs.rates("Megatron's script")
        rates["Megatron after start-up"] = costs.rates(
            "Megatron's script", "start-up of Megatron's script"
        )
        compared += [
            ("full command", "Megatron's script"),
            ("command after start-up", "Megatron after start-up"),
            ("full command, reference", "Megatron's script"),
            ("reference after start-up", "Megatron after start-up"),
        ]
    start = costs["start-up"]
    print(f"{'start-up':52} {start.wall_s:8.2f} s     {start.cpu_s:8.2f} CPU-s")
    for name, (on_clock, per_cpu_s) in rates.items():
        print(f"{name:52} {on_clock:8.1f} MB/s  {per_cpu_s:8.1f} MB/CPU-s")
    for name, other in compared:
        on_clock, of_cpu = (a / b for a, b in zip(rates[name], rates[other], strict=True))
        print(f"ratio {f'{name} / {other}':46} {on_clock:8.2f} clock {of_cpu:8.2f} CPU time")
    print(f"peak memory of the command {costs['command'].peak_mb:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--input", type=Path, help="jsonl with the key text")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--encoder", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--slow-megabytes", type=float, default=8.0, help="text for the slow contenders"
    )
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    with tempfile.TemporaryDirectory() as directory:
        measure(parser.parse_args(), Path(directory))


if __name__ == "__main__":
    main()
