"""Preference data for tests, by the project's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import ShardRecord, Split
from bigtrain.data.shards.writer import ShardWriter
from tests.support.datasets import write_synthetic_manifest


def write_pairs(
    directory: Path, *, vocab_size: int, num_pairs: int = 48, longest: int = 33, seed: int = 0
) -> Path:
    """Pairs of answers to a prompt, chosen then rejected; a sixth are held out.

    The chosen answer counts up, the rejected one is random; prompts are no targets.
    """
    (directory / "tokenizer").mkdir(parents=True)
    generator = np.random.default_rng(seed)
    dtype = token_dtype(vocab_size)
    splits: dict[Split, tuple[ShardRecord, ...]] = {"train": (), "held_out": ()}
    parts: list[tuple[Split, int]] = [("train", num_pairs), ("held_out", num_pairs // 6)]
    for split, count in parts:
        with ShardWriter(directory, f"{split}_00000", dtype, masked=True) as writer:
            for _ in range(count):
                prompt = generator.integers(1, vocab_size, int(generator.integers(2, 9)))
                for is_chosen in (True, False):
                    length = int(generator.integers(1, longest - len(prompt)))
                    steps = np.arange(length) if is_chosen else generator.integers(0, 99, length)
                    answer = (int(prompt[-1]) + steps) % (vocab_size - 1) + 1
                    tokens = np.concatenate([prompt, answer]).astype(np.int64)
                    mask = np.arange(len(tokens)) >= len(prompt)
                    writer.add(tokens, np.array([len(tokens)]), len(tokens), mask=mask)
            splits[split] += (writer.close(),)
    write_synthetic_manifest(directory, vocab_size, splits, rows="preference")
    return directory
