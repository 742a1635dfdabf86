"""Small real datasets for tests, written through the project's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bigtrain.data.shards.dataset import TokenDataset, open_dataset
from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import (
    Manifest,
    OptionsRecord,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)
from bigtrain.data.shards.verification import corrupt_files
from bigtrain.data.shards.writer import ShardWriter

END_OF_DOCUMENT = 0


def open_verified(path: Path) -> TokenDataset:
    """The dataset in directory `path`, whose files all have the manifest's checksums."""
    assert corrupt_files(path) == []
    return open_dataset(path)


def write_dataset(
    directory: Path,
    *,
    vocab_size: int,
    num_documents: int = 60,
    seed: int = 0,
    masked: bool = False,
) -> Path:
    """Random documents of 5 to 60 tokens with a learnable pattern, each closed by token 0.

    A tenth of them are held out. `masked`: about two in five tokens are targets. There is no
    tokenizer beside them: nothing here reads text.
    """
    directory.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    dtype = token_dtype(vocab_size)
    splits = {}
    for split, count in (("train", num_documents), ("held_out", max(1, num_documents // 10))):
        with ShardWriter(directory, f"{split}_00000", dtype, masked=masked) as writer:
            for _ in range(count):
                length = int(generator.integers(5, 60))
                start = int(generator.integers(1, vocab_size))
                stride = int(generator.integers(1, 4))
                body = (start + stride * np.arange(length)) % (vocab_size - 1) + 1
                tokens = np.append(body, END_OF_DOCUMENT).astype(np.int64)
                mask = generator.random(len(tokens)) < 0.4 if masked else None
                writer.add(tokens, np.array([len(tokens)]), len(tokens), mask)
            splits[split] = (writer.close(),)
    write_manifest(
        directory,
        Manifest(
            tokenizer=TokenizerRecord(
                name="synthetic",
                hash="0" * 16,
                vocab_size=vocab_size,
                end_of_document_id=END_OF_DOCUMENT,
                engine="none",
            ),
            token_dtype=dtype,
            sources=(),
            options=OptionsRecord(held_out=0.1),
            splits=splits,
        ),
    )
    return directory


def forget_blocks(directory: Path) -> Path:
    """Make the dataset one of those that were written without checksums of blocks."""
    manifest = read_manifest(directory)
    splits = {
        split: tuple(shard.model_copy(update={"blocks_xxh3": None}) for shard in shards)
        for split, shards in manifest.splits.items()
    }
    write_manifest(directory, manifest.model_copy(update={"splits": splits}))
    for file in directory.glob("*.blocks"):
        file.unlink()
    return directory
