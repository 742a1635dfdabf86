"""Small real datasets for tests, written through the project's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bigtrain.data.shards.dataset import TokenDataset, open_dataset
from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import (
    Manifest,
    OptionsRecord,
    ShardRecord,
    Split,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)
from bigtrain.data.shards.verification import corrupt_files
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.objectives.rows import Rows

END_OF_DOCUMENT = 0


def open_verified(path: Path) -> TokenDataset:
    """Return the dataset in directory `path`, whose files all have the manifest's checksums."""
    assert corrupt_files(path) == []
    return open_dataset(path)


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory, by their relative paths."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def write_dataset(
    directory: Path,
    *,
    vocab_size: int,
    num_documents: int = 60,
    seed: int = 0,
    masked: bool = False,
    num_shards: int = 1,
) -> Path:
    """Random documents of 5 to 60 tokens with a learnable pattern, each closed by token 0.

    A tenth of them are held out, and the others are in `num_shards`. `masked`: about two in
    five tokens are targets. The tokenizer's directory is empty: nothing here reads text.
    """
    (directory / "tokenizer").mkdir(parents=True)
    generator = np.random.default_rng(seed)
    dtype = token_dtype(vocab_size)
    splits: dict[Split, tuple[ShardRecord, ...]] = {"train": (), "held_out": ()}
    held_out = max(1, num_documents // 10)
    parts: list[tuple[Split, int, int]] = [
        *(("train", number, num_documents // num_shards) for number in range(num_shards)),
        ("held_out", 0, held_out),
    ]
    for split, number, count in parts:
        with ShardWriter(directory, f"{split}_{number:05d}", dtype, masked=masked) as writer:
            for _ in range(count):
                length = int(generator.integers(5, 60))
                start = int(generator.integers(1, vocab_size))
                stride = int(generator.integers(1, 4))
                body = (start + stride * np.arange(length)) % (vocab_size - 1) + 1
                tokens = np.append(body, END_OF_DOCUMENT).astype(np.int64)
                mask = generator.random(len(tokens)) < 0.4 if masked else None
                writer.add(tokens, np.array([len(tokens)]), len(tokens), mask=mask)
            splits[split] += (writer.close(),)
    write_synthetic_manifest(directory, vocab_size, splits)
    return directory


def write_synthetic_manifest(
    directory: Path,
    vocab_size: int,
    splits: dict[Split, tuple[ShardRecord, ...]],
    rows: Rows | None = None,
    labels: tuple[str, ...] = (),
) -> None:
    """Write the manifest of shards whose tokens no tokenizer made."""
    tokenizer = TokenizerRecord(
        name="synthetic",
        hash="0" * 16,
        vocab_size=vocab_size,
        end_of_document_id=END_OF_DOCUMENT,
        engine="none",
    )
    manifest = Manifest(
        tokenizer=tokenizer,
        token_dtype=token_dtype(vocab_size),
        sources=(),
        options=OptionsRecord(held_out=0.1, labels=labels),
        splits=splits,
        rows=rows,
    )
    write_manifest(directory, manifest)


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
