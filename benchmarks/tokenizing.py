"""How fast `bigtrain tokenize` is, as ratios within one run on one machine.

Not called tokenize.py: a script there would hide the standard library's module of that name.

In MB of text per CPU second (user and system, of all threads and child processes), which other work
on the machine disturbs least: the whole command in a fresh process, the same without its start-up
(measured on one document), its own encoder alone on text already in memory, the same encoder with
orjson parsing each line before (what no reader of this input in Python can be faster than), the
reference encoder alone, the command with the reference encoder, and Megatron-LM's script where a
checkout is given. Contenders take turns, the best of the rounds counts. Then the ratios, those to
Megatron-LM's script also in seconds on the clock, and the peak memory.

    python benchmarks/tokenizing.py [--megabytes 200] [--input FILE.jsonl] [--tokenizer DIR]
        [--megatron MEGATRON_LM]   # what it needs to be imported is PYTHONPATH's affair
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from bigtrain.data.encoder_choice import choose_encoder
from bigtrain.data.encoders import Encoder
from bigtrain.data.tokenization import load_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
BATCH_BYTES = 1 << 20
REFERENCE_BYTES = 8_000_000


def python_sources(num_bytes: int) -> Iterator[str]:
    """Source files of this Python and its packages, as often as it takes."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = sorted(stdlib.rglob("*.py"))
    left, turn = num_bytes, 0
    while left > 0:
        for file in files:
            text = f"# {turn}\n" + file.read_bytes().decode("utf-8", "ignore")
            yield text
            left -= len(text)
            if left <= 0:
                return
        turn += 1


def batches(texts: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_alone(encoder: Encoder, texts: list[bytes]) -> float:
    """CPU seconds for `texts` with a new encoder, whose caches are empty."""
    fresh = type(encoder)(encoder.tokenizer_json, encoder.end_of_document_id)
    fresh.encode_utf8([b"x"])
    started_at = time.process_time()
    for batch in batches(texts):
        fresh.encode_utf8(batch)
    return time.process_time() - started_at


def parse_and_encode_alone(encoder: Encoder, lines: list[bytes]) -> float:
    """CPU seconds for the texts in `lines` of JSON in memory: parsed by orjson, and encoded."""
    fresh = type(encoder)(encoder.tokenizer_json, encoder.end_of_document_id)
    fresh.encode_utf8([b"x"])
    started_at = time.process_time()
    for batch in batches(lines):
        fresh.encode_utf8([orjson.loads(line)["text"].encode() for line in batch])
    return time.process_time() - started_at


@dataclass(frozen=True)
class Cost:
    """Of a command: CPU seconds, seconds on the clock, and peak memory of its largest process."""

    cpu_s: float
    wall_s: float
    peak_mb: float


# The peak of a process counts what the process it was forked from had, which here is all the text.
RUN = """
import json, os, resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000]))
"""


def run_command(words: Sequence[str], **environment: str) -> Cost:
    """`words` as a process, with its children. Raises RuntimeError where it fails."""
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
    """What is compared, on any file of lines."""

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


def first_megabytes(texts: list[str], megabytes: float) -> list[str]:
    size, count = 0, 0
    while count < len(texts) and size < megabytes * 1e6:
        size += len(texts[count].encode("utf-8"))
        count += 1
    return texts[:count]


def megabytes_of(texts: Sequence[str]) -> float:
    return sum(len(text.encode("utf-8")) for text in texts) / 1e6


def measure(args: argparse.Namespace, directory: Path) -> None:
    if args.input:
        with args.input.open(encoding="utf-8") as file:
            texts = first_megabytes([json.loads(line)["text"] for line in file], args.megabytes)
    else:
        texts = list(python_sources(int(args.megabytes * 1e6)))
    source = write_lines(directory / "in.jsonl", texts)
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
    costs: dict[str, list[Cost]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        costs["start"].append(commands.bigtrain(one, args.encoder))
        costs["whole"].append(commands.bigtrain(source, args.encoder))
        alone["own"].append(encode_alone(queue.current, [text.encode() for text in texts]))
        lines = source.read_bytes().splitlines()
        alone["own with parsing"].append(parse_and_encode_alone(queue.current, lines))
        del lines
        alone["reference"].append(encode_alone(queue.reference, [text.encode() for text in part]))
        costs["fallback start"].append(commands.bigtrain(one, "reference"))
        costs["fallback"].append(commands.bigtrain(part_source, "reference"))
        if args.megatron:
            costs["megatron start"].append(commands.megatrons(one))
            costs["megatron"].append(commands.megatrons(part_source))
    print(f"{megabytes_of(texts):.1f} MB of text, {len(texts)} documents, {queue.current.engine()}")
    print(f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    report(costs, alone, megabytes_of(texts), megabytes_of(part), first)


def _more(seconds: dict[str, float], name: str, start: str) -> float:
    """What grows with the input; of very little text the noise may be larger."""
    return max(1e-3, seconds[name] - seconds[start])


def report(
    costs: dict[str, list[Cost]],
    alone: dict[str, list[float]],
    megabytes: float,
    part: float,
    first: Cost,
) -> None:
    cpu_s = {name: min(cost.cpu_s for cost in found) for name, found in costs.items()}
    cpu_s |= {name: min(found) for name, found in alone.items()}
    rates = {
        "whole command": megabytes / cpu_s["whole"],
        "whole command without start-up": megabytes / _more(cpu_s, "whole", "start"),
        "its encoder alone, in memory": megabytes / cpu_s["own"],
        "its encoder and JSON, in memory": megabytes / cpu_s["own with parsing"],
        "reference encoder alone": part / cpu_s["reference"],
        "with reference, without start-up": part / _more(cpu_s, "fallback", "fallback start"),
    }
    if "megatron" in cpu_s:
        rates["Megatron's script, no start-up"] = part / _more(cpu_s, "megatron", "megatron start")
    wall_s = min(cost.wall_s for cost in costs["whole"])
    print(f"{'start-up':34} {cpu_s['start']:8.2f} CPU-s, {first.cpu_s:.2f} the first time")
    print(f"{'whole command':34} {cpu_s['whole']:8.2f} CPU-s, {wall_s:.2f} s")
    for name, rate in rates.items():
        print(f"{name:34} {rate:8.1f} MB/CPU-s")
    whole, streaming, own, parsing, reference, fallback, *megatron = rates.values()
    ratios = {
        "whole / encoder alone": whole / own,
        "without start-up / encoder alone": streaming / own,
        "encoder and JSON / encoder alone": parsing / own,
        "whole / encoder and JSON": whole / parsing,
        "without start-up / encoder and JSON": streaming / parsing,
        "whole / reference alone": whole / reference,
        "with reference / reference alone": fallback / reference,
    }
    if megatron:
        ratios["without start-up / Megatron"] = streaming / megatron[0]
        ratios["whole / Megatron's whole"] = whole / (part / cpu_s["megatron"])
        ratios["with reference / Megatron"] = fallback / megatron[0]
        clock_s = {name: min(cost.wall_s for cost in found) for name, found in costs.items()}
        rate = part / clock_s["megatron"]
        ratios["on the clock, whole / Megatron"] = megabytes / clock_s["whole"] / rate
        ratios["on the clock, reference / Megatron"] = part / clock_s["fallback"] / rate
        ratios["the same without both start-ups"] = _more(
            clock_s, "megatron", "megatron start"
        ) / _more(clock_s, "fallback", "fallback start")
    for name, ratio in ratios.items():
        print(f"ratio {name:34} {ratio:7.2f}")
    print(f"peak memory of the command {max(cost.peak_mb for cost in costs['whole']):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0)
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
