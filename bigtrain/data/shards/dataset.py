"""Datasets of token shards: a directory, its manifest, and the shards that it lists. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bigtrain.data.shards.format import Shard
from bigtrain.data.shards.manifest import (
    TOKENIZER_DIRECTORY,
    Manifest,
    ShardRecord,
    Split,
    read_manifest,
)
from bigtrain.errors import DataError
from bigtrain.settings.run_config import DataSection

Level = Literal["sizes", "index"]


@dataclass(frozen=True)
class TokenDataset:
    """A finished dataset: its manifest, and its shards by split in stream order."""

    path: Path
    manifest: Manifest
    splits: dict[Split, tuple[Shard, ...]]

    def shards(self, split: Split) -> Sequence[Shard]:
        """The shards of `split`; none where the dataset has no such split."""
        return self.splits.get(split, ())

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_DIRECTORY


def open_dataset(path: str | Path, check: Level = "index") -> TokenDataset:
    """The dataset in directory `path`.

    `check`: ``sizes`` compares headers and file sizes with the manifest; ``index`` also reads every
    index. Raises DataError where the directory, the manifest or a shard is missing, corrupt, or not
    what the manifest says, and where the training split holds no token.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    if not manifest.num_tokens("train"):
        raise DataError(f"{directory} is empty: its training split holds 0 tokens")
    splits = {
        split: tuple(_open_shard(directory, record, manifest, check) for record in records)
        for split, records in manifest.splits.items()
    }
    return TokenDataset(directory, manifest, splits)


def _open_shard(directory: Path, record: ShardRecord, manifest: Manifest, check: Level) -> Shard:
    shard = Shard(
        directory / record.name,
        masked=record.mask_xxh3 is not None,
        checksums=record.checksums,
    )
    for what, found, expected in (
        ("bytes", shard.num_bytes, record.bytes),
        ("documents", shard.num_documents, record.documents),
        ("token type", shard.dtype.name, manifest.token_dtype),
    ):
        if found != expected:
            raise DataError(
                f"{shard.bin_path} is corrupt: {what} {found}, the manifest says {expected} -> "
                "tokenize again"
            )
    if check != "sizes":
        shard.check_index()
    return shard


def open_sources(data: DataSection) -> tuple[TokenDataset, ...]:
    """The datasets of a run's mixture, in its order, checked by sizes alone: what is read of them
    is checked when it is. Raises DataError as `open_dataset`."""
    return tuple(open_dataset(source.path, check="sizes") for source in data.mixture)
