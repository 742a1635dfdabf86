"""Datasets with weights of losses of tokens, by the project's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import ShardRecord, Split
from bigtrain.data.shards.writer import ShardWriter
from tests.support.datasets import write_synthetic_manifest

FIRST_WEIGHTED = 48
"""Smaller tokens have the weight 1."""


def weights_of(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return the weight of each token, which depends on its id only."""
    weights = np.where(tokens < FIRST_WEIGHTED, 1, (tokens % 7 + 0.5) / 4)
    return weights.astype(np.float32)


def write_weighted(
    directory: Path, *, low: int, vocab_size: int, shards: tuple[int, ...] = (30, 20), seed: int = 0
) -> Path:
    """Documents of tokens from `low` on, in shards of so many documents, the last one held out;
    two in three tokens are targets."""
    (directory / "tokenizer").mkdir(parents=True)
    generator = np.random.default_rng(seed)
    splits: dict[Split, tuple[ShardRecord, ...]] = {"train": (), "held_out": ()}
    for number, count in enumerate(shards):
        split: Split = "held_out" if number == len(shards) - 1 else "train"
        name = f"{split}_{number:05d}"
        with ShardWriter(directory, name, token_dtype(vocab_size), masked=True) as writer:
            for _ in range(count):
                length = int(generator.integers(4, 30))
                high = min(vocab_size, 2 * FIRST_WEIGHTED) if low else FIRST_WEIGHTED
                tokens = generator.integers(max(low, 1), high, length)
                mask = generator.random(length) < 0.67
                mask[1] = True
                weights = weights_of(tokens) if low else None
                writer.add(tokens, np.array([length]), length, mask=mask, weights=weights)
            splits[split] += (writer.close(),)
    write_synthetic_manifest(directory, vocab_size, splits)
    return directory
