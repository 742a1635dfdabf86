"""How fast `bigtrain tokenize` is, as ratios within one run on one machine.

Not called tokenize.py: a script there would hide the standard library's module of that name.

Prints MB/s of text of: the whole command in a fresh process, the same without what does not grow
with the input (start-up and the proof of the encoder, measured by a run on one document), its own
encoder alone on text already in memory, and the reference encoder alone; then their ratios and
the command's peak memory.

    python benchmarks/tokenizing.py [--megabytes 200] [--input FILE.jsonl] [--tokenizer DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bigtrain.data.encoders import Encoder, choose_encoder
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
    """Seconds for `texts` with a new encoder, whose caches are empty."""
    fresh = type(encoder)(encoder.tokenizer_json, encoder.end_of_document_id)
    fresh.encode_utf8([])
    started_at = time.perf_counter()
    for batch in batches(texts):
        fresh.encode_utf8(batch)
    return time.perf_counter() - started_at


def command(source: Path, tokenizer: Path, output: Path, encoder: str) -> tuple[float, float]:
    """Seconds and peak MB of the whole command."""
    words = [sys.executable, "-m", "bigtrain.cli", "tokenize", "--input", str(source)]
    words += ["--tokenizer", str(tokenizer), "--output", str(output), "--encoder", encoder]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    started_at = time.perf_counter()
    subprocess.run(
        words, check=True, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - started_at
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000


def write_lines(path: Path, texts: list[str]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


def measure(args: argparse.Namespace, directory: Path) -> None:
    if args.input:
        with args.input.open(encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        source = args.input
    else:
        texts = list(python_sources(int(args.megabytes * 1e6)))
        source = write_lines(directory / "in.jsonl", texts)
    tokenizer = args.tokenizer
    if tokenizer is None:
        tokenizer = directory / "tokenizer"
        train_tokenizer([texts[: max(1, len(texts) // 20)]], args.vocab_size).save(tokenizer)
    # The peak of all children so far: the small run first, the large one after it.
    one = write_lines(directory / "one.jsonl", texts[:1])
    start_s, _ = command(one, tokenizer, directory / "one", args.encoder)
    whole_s, peak_mb = command(source, tokenizer, directory / "out", args.encoder)
    contents = [text.encode("utf-8") for text in texts]
    del texts
    megabytes = sum(map(len, contents)) / 1e6
    queue = choose_encoder(load_tokenizer(str(tokenizer)).encoder(), args.encoder)
    alone_s = encode_alone(queue.current, contents)
    part, size = 0, 0
    while part < len(contents) and size < REFERENCE_BYTES:
        size += len(contents[part])
        part += 1
    reference = size / 1e6 / encode_alone(queue.reference, contents[:part])
    whole, streaming = megabytes / whole_s, megabytes / max(1e-9, whole_s - start_s)
    alone = megabytes / alone_s
    print(f"{megabytes:.1f} MB of text, {len(contents)} documents, {queue.current.engine()}")
    print(f"start-up and proof             {start_s:9.2f} s")
    print(f"whole command                  {whole:9.1f} MB/s, {whole_s:.2f} s")
    print(f"whole command without start-up {streaming:9.1f} MB/s")
    print(f"encoder alone, in memory       {alone:9.1f} MB/s")
    print(f"reference encoder alone        {reference:9.1f} MB/s, on {size / 1e6:.1f} MB")
    print(f"ratio whole / encoder alone              {whole / alone:6.2f}")
    print(f"ratio without start-up / encoder alone   {streaming / alone:6.2f}")
    print(f"ratio whole / reference alone            {whole / reference:6.2f}")
    print(f"peak memory of the command     {peak_mb:9.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--input", type=Path, help="jsonl with the key text")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--encoder", default="auto")
    with tempfile.TemporaryDirectory() as directory:
        measure(parser.parse_args(), Path(directory))


if __name__ == "__main__":
    main()
