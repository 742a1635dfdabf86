"""Answers with labels (KTO) for tests, by the project's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import ShardRecord, Split
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.objectives.rows import Rows
from tests.support.datasets import write_synthetic_manifest


def write_rated(
    directory: Path,
    *,
    vocab_size: int,
    shards: tuple[int, ...] = (20, 1, 11),
    held_out: int = 0,
    longest: int = 33,
    labels: tuple[str, ...] = (),
) -> Path:
    """Answers to prompts of random tokens, in shards of so many documents; prompts are no
    targets, and every third answer is one token. `labels`: names; the rows are then those of
    classification."""
    (directory / "tokenizer").mkdir(parents=True)
    generator = np.random.default_rng(0)
    splits: dict[Split, tuple[ShardRecord, ...]] = {"train": (), "held_out": ()}
    parts: list[tuple[Split, int]] = [("train", count) for count in shards]
    for split, count in [*parts, ("held_out", held_out)][: len(parts) + bool(held_out)]:
        name, dtype = f"{split}_{len(splits[split]):05d}", token_dtype(vocab_size)
        with ShardWriter(directory, name, dtype, masked=True, labeled=True) as writer:
            for row in range(count):
                prompt = int(generator.integers(2, 9))
                length = prompt + (int(generator.integers(1, longest - prompt)) if row % 3 else 1)
                tokens = generator.integers(1, vocab_size, length)
                label = generator.integers(0, len(labels) or 2, 1).astype(np.uint8)
                writer.add(
                    tokens,
                    np.array([length]),
                    length,
                    mask=np.arange(length) >= prompt,
                    labels=label,
                )
            splits[split] += (writer.close(),)
    rows: Rows = "classification" if labels else "kto"
    write_synthetic_manifest(directory, vocab_size, splits, rows=rows, labels=labels)
    return directory
