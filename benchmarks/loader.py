"""Cost of reading batches: the loader compared with a bare gather, and the time to the first batch.

bare      numpy: windows of a memory map, in the order of a shuffled array, copied into one int64
          batch; no labels, no checks, no thread. All ratios of bigtrain are to this one
bare, as stored          the same without widening: a limit, for no model takes such tokens
bare, inputs and labels  the same into the two int64 arrays that a model takes
bare, isolated documents the same with position ids that restart after every end-of-document token,
          which is searched for, and no label across it
bigtrain  `TrainingBatches.step`, what a training run calls: order, tokens, vocabulary check, inputs
          and labels as int64 tensors; also with isolated documents, and from a mixture

All read the same dataset with a warm page cache in one process and take turns, so that whatever
else the machine does falls on all; ratios, of wall and of CPU time, are medians over the rounds.
Every turn begins where nothing was read ahead; its CPU time has that of the threads, with what they
read ahead for nobody at its end.

Before that the time from opening to the first batch: real files of a small dataset, and sparse
files that claim to hold 1e12 tokens in 1e9 documents, compared with what Megatron builds for the
small one (shuffled documents, a row per sample, shuffled samples), here in vectorised numpy. Prints
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.shards.format import HEADER, INDEX_VERSION, MAGIC
from bigtrain.data.shards.manifest import (
    Manifest,
    OptionsRecord,
    ShardRecord,
    TokenizerRecord,
    write_manifest,
)
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig

VOCABULARY = 32_000
BATCH_SAMPLES = 32
DOCUMENT_TOKENS = 1000
IDLE_SECONDS = 0.005
SKIPPED_BATCHES = 1000
"""Between turns, so that none uses what was read ahead in another."""
UINT16_CODE = 8


def write_manifest_of(directory: Path, shards: Sequence[ShardRecord]) -> None:
    """Write the manifest of shards without a tokenizer."""
    tokenizer = TokenizerRecord(
        name="none", hash="0" * 16, vocab_size=VOCABULARY, end_of_document_id=0, engine="none"
    )
    options = OptionsRecord()
    manifest = Manifest(
        tokenizer=tokenizer,
        token_dtype="uint16",
        sources=(),
        options=options,
        splits={"train": tuple(shards)},
    )
    write_manifest(directory, manifest)


def write_dataset(directory: Path, num_tokens: int, seed: int) -> None:
    """Write one shard of random documents of about `DOCUMENT_TOKENS` tokens."""
    directory.mkdir()
    generator = np.random.default_rng(seed)
    with ShardWriter(directory, "train_00000", "uint16") as writer:
        while writer.num_tokens < num_tokens:
            lengths = generator.integers(1, 2 * DOCUMENT_TOKENS, 1000)
            tokens = generator.integers(1, VOCABULARY, lengths.sum(), dtype=np.uint16)
            tokens[np.cumsum(lengths) - 1] = 0
            writer.add(tokens, lengths, len(tokens))
        write_manifest_of(directory, [writer.close()])


def write_sparse_dataset(directory: Path, num_shards: int, tokens: int, documents: int) -> None:
    """Shards of `tokens` zeros and `documents` documents each, of which the disk holds headers."""
    directory.mkdir()
    records = []
    for number in range(num_shards):
        name = f"train_{number:05d}"
        with (directory / f"{name}.idx").open("wb") as file:
            file.write(HEADER.pack(MAGIC, INDEX_VERSION, UINT16_CODE, documents, documents + 1))
            file.truncate(HEADER.size + 20 * documents + 8)
        with (directory / f"{name}.bin").open("wb") as file:
            file.truncate(2 * tokens)
        records.append(
            ShardRecord(
                name=name,
                documents=documents,
                tokens=tokens,
                bytes=2 * tokens,
                text_bytes=0,
                xxh3="0" * 16,
                index_xxh3="0" * 16,
            )
        )
    write_manifest_of(directory, records)


def run_config(data: dict[str, Any], sequence_length: int) -> RunConfig:
    """Return a run that reads `data`."""
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "llama", "vocab_size": VOCABULARY}},
            "data": data,
            "batch": {"sequence_length": sequence_length, "global_batch_size": BATCH_SAMPLES},
            "train": {"steps": 1},
            "optimizer": {"lr": 1e-3},
            "output": {"directory": "unused"},
        }
    )


def bare_gather(
    path: Path, sequence_length: int, kind: Literal["one", "stored", "both", "isolated"]
) -> Callable[[int], None]:
    """Reads batch `number` as a plain script would, into `kind` of arrays."""
    tokens = np.memmap(path / "train_00000.bin", dtype="<u2", mode="r")
    num_windows = (len(tokens) - 1) // sequence_length
    order = np.random.default_rng(0).permutation(num_windows)
    dtype = np.uint16 if kind == "stored" else np.int64
    width = sequence_length if kind in ("both", "isolated") else sequence_length + 1
    places = np.arange(width)

    def read(number: int) -> None:
        batch = np.empty((BATCH_SAMPLES, width), dtype)
        labels = np.empty_like(batch) if kind in ("both", "isolated") else None
        positions = np.empty_like(batch) if kind == "isolated" else None
        for row in range(BATCH_SAMPLES):
            start = order[(number * BATCH_SAMPLES + row) % num_windows] * sequence_length
            batch[row] = tokens[start : start + width]
            if labels is not None:
                labels[row] = tokens[start + 1 : start + 1 + width]
                if positions is not None:
                    ends = np.flatnonzero(batch[row] == 0)
                    labels[row, ends] = -100
                    positions[row] = places
                    for end in ends:
                        positions[row, end + 1 :] = places[: width - 1 - end]

    return read


def seconds_of(read: Callable[[int], object], first: int, batches: int) -> tuple[float, float]:
    """Wall seconds and CPU seconds (of all threads) of one turn."""
    begun, cpu_begun = time.perf_counter(), time.process_time()
    for number in range(first, first + batches):
        read(number)
    wall, before = time.perf_counter() - begun, -1.0
    while time.process_time() - before > IDLE_SECONDS / 2:  # threads still read ahead
        before = time.process_time()
        time.sleep(IDLE_SECONDS)
    return wall, time.process_time() - cpu_begun


def throughput(root: Path, sequence_length: int, batches: int, rounds: int) -> dict[str, Any]:
    """Return samples per second of each contender, and its ratio to the bare gather."""
    paths = [root / "a", root / "b"]
    mixture = [
        {"path": str(path), "weight": weight} for path, weight in zip(paths, (3, 1), strict=True)
    ]
    variants: dict[str, dict[str, Any]] = {
        "bigtrain": {"path": str(paths[0])},
        "bigtrain, isolated documents": {"path": str(paths[0]), "document_boundaries": "isolate"},
        "bigtrain, mixture of two": {"sources": mixture},
    }
    plan = BatchPlan(BATCH_SAMPLES, BATCH_SAMPLES, 1, 1, sequence_length)
    opened = {
        name: open_training_data(run_config(data, sequence_length), plan, 0)
        for name, data in variants.items()
    }
    readers: dict[str, Callable[[int], object]] = {
        "bare": bare_gather(paths[0], sequence_length, "one"),
        "bare, as stored": bare_gather(paths[0], sequence_length, "stored"),
        "bare, inputs and labels": bare_gather(paths[0], sequence_length, "both"),
        "bare, isolated documents": bare_gather(paths[0], sequence_length, "isolated"),
    }
    for name, loader in opened.items():
        readers[name] = lambda number, loader=loader: loader.step(number * BATCH_SAMPLES)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for turn in range(rounds + 1):
        for name, read in readers.items():
            seconds = seconds_of(read, turn * (batches + SKIPPED_BATCHES), batches)
            if turn:  # the first warms the page cache
                turns[name].append(seconds)
    for loader in opened.values():
        loader.close()
    bare = turns["bare"]
    samples = batches * BATCH_SAMPLES
    return {
        name: {
            "samples_per_second": round(samples / statistics.median(wall for wall, _ in own)),
            "cpu_microseconds_per_sample": round(
                statistics.median(cpu for _, cpu in own) / samples * 1e6, 2
            ),
            "ratio_to_bare": _median_ratio(bare, own, 0),
            "cpu_ratio_to_bare": _median_ratio(bare, own, 1),
        }
        for name, own in turns.items()
    }


def _median_ratio(
    bare: Sequence[tuple[float, float]], own: Sequence[tuple[float, float]], kind: int
) -> float:
    pairs = zip(bare, own, strict=True)
    return round(statistics.median(there[kind] / here[kind] for there, here in pairs), 3)


def first_batch(path: Path, sequence_length: int, rounds: int) -> dict[str, float]:
    """Return seconds from opening to the first batch, and the memory it took."""
    plan = BatchPlan(BATCH_SAMPLES, BATCH_SAMPLES, 1, 1, sequence_length)
    config = run_config({"path": str(path)}, sequence_length)
    seconds, before = [], own_mib()
    for _ in range(rounds):
        begun = time.perf_counter()
        with closing(open_training_data(config, plan, 0)) as loader:
            loader.step(0)
            seconds.append(time.perf_counter() - begun)
    return {
        "seconds": round(statistics.median(seconds), 4),
        "seconds_first": round(seconds[0], 4),
        "memory_mib": round(own_mib() - before, 1),
    }


def megatron_index(path: Path, sequence_length: int) -> float:
    """Return seconds to build what GPTDataset builds for one epoch."""
    begun = time.perf_counter()
    with (path / "train_00000.idx").open("rb") as file:
        num_sequences = HEADER.unpack(file.read(HEADER.size))[3]
        lengths = np.fromfile(file, "<i4", num_sequences)
    generator = np.random.RandomState(0)
    documents = np.arange(len(lengths), dtype=np.int32)
    generator.shuffle(documents)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    starts = np.arange((ends[-1] - 1) // sequence_length + 1, dtype=np.int64) * sequence_length
    rows = np.searchsorted(ends, starts, side="right")
    begins = ends[rows] - lengths[documents[rows]]
    np.stack([rows, starts - begins], axis=1).astype(np.int32)
    samples = np.arange(len(starts) - 1, dtype=np.int64)
    generator.shuffle(samples)
    return time.perf_counter() - begun


def own_mib() -> float:
    """Return the private memory of this process, in MiB: not the pages of files that it has
    mapped."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:", 1)[1].split(None, 1)[0]) / 2**10


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence-length", type=int, default=2048, help="tokens")
    parser.add_argument("--tokens", type=float, default=1e8, help="of the dataset that is read")
    parser.add_argument("--sparse-shards", type=int, default=1000, help="of 1e9 tokens each")
    parser.add_argument("--batches", type=int, default=1000, help="per turn, of 32 samples")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where the datasets are put (default: a temporary one)")
    parser.add_argument("--tiny", action="store_true", help="prove that it runs, measure nothing")
    args = parser.parse_args(argv)
    if args.tiny:
        args.tokens, args.sparse_shards, args.batches, args.rounds = 2e5, 2, 2, 1
        args.sequence_length = 64
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        root = Path(name)
        write_dataset(root / "a", int(args.tokens), 0)
        write_dataset(root / "b", max(100_000, int(args.tokens) // 10), 1)
        write_sparse_dataset(root / "sparse", args.sparse_shards, 10**9, 10**6)
        length = args.sequence_length
        result = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "sequence_length": length,
            "tokens": int(args.tokens),
            "open_to_first_batch": {
                f"{args.tokens:.0e} tokens": first_batch(root / "a", length, args.rounds),
                f"{args.sparse_shards * 10**9:.0e} tokens in {args.sparse_shards * 10**6:.0e} "
                "documents, sparse": first_batch(root / "sparse", length, args.rounds),
                f"{args.tokens:.0e} tokens, only Megatron's index": {
                    "seconds": round(megatron_index(root / "a", length), 4)
                },
            },
            "throughput": throughput(root, length, args.batches, args.rounds),
        }
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
