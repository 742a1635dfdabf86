"""Table of the manifest's shards as columns of numbers. numpy only.

As objects, 100,000 shards take a rank 300 MB and seconds; as columns 8 MB and, for a large
manifest, no parsing: all ranks of a host memory-map one file. The file is a cache of the manifest,
named by the manifest's checksum, and made once (`bigtrain.system.user_cache`) in
``DATASET/tables/`` or, if that cannot be written, in ``tables/`` of the user's cache. A file is::

    8 bytes  b"BTSHARD4"
    uint64   bytes of the head, little-endian
    uint64   XXH3-64 of the bytes after it
    head     JSON: tokenizer, token_dtype, rows, is_masked, has_blocks, by split the number of
             shards and the bytes of text
    ROW      [shards], split after split
    UTF-8    names of the shards, without separators
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.shards.block_checksums import SUFFIX as BLOCKS
from bigtrain.data.shards.manifest import (
    CHECKSUM_FIELDS,
    LABELED,
    MANIFEST_NAME,
    Manifest,
    Split,
    TokenizerRecord,
    read_manifest,
)
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import documents_per_row
from bigtrain.system.files import file_checksum
from bigtrain.system.user_cache import cache_locations, made_once

MAGIC = b"BTSHARD4"
WEIGHTS = "weights"
DIRECTORY = "tables"
MIN_MANIFEST_BYTES = 1 << 20
"""Below this size a manifest is read in some milliseconds, and no table is written."""

_START = struct.Struct("<8sQQ")
_COLUMNS = ("tokens", "documents", "bytes", *CHECKSUM_FIELDS.values(), "name_end")
ROW = np.dtype([(name, "<u8") for name in _COLUMNS])


@dataclass(frozen=True)
class ShardColumns:
    """Shards of a split, in stream order: `rows`, `ROW` [shards]. The name of a shard ends at byte
    `name_end` of `names`, where the next name begins; the first begins at `names_begin`. Checksums
    of absent files are 0."""

    rows: npt.NDArray[Any]
    names: memoryview
    is_masked: bool
    has_blocks: bool
    names_begin: int = 0
    has_labels: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, number: int) -> str:
        begin = int(self.rows["name_end"][number - 1]) if number else self.names_begin
        return str(self.names[begin : int(self.rows["name_end"][number])], "utf-8")

    def checksums(self, number: int) -> dict[str, str]:
        """Return the XXH3-64 of every file of a shard, by suffix."""
        row = self.rows[number]
        optional = {
            "mask": self.is_masked,
            BLOCKS: self.has_blocks,
            "labels": self.has_labels,
            WEIGHTS: bool(row[CHECKSUM_FIELDS[WEIGHTS]]),
        }
        return {
            suffix: f"{int(row[column]):016x}"
            for suffix, column in CHECKSUM_FIELDS.items()
            if optional.get(suffix, True)
        }

    @property
    def have_weights(self) -> npt.NDArray[np.bool_]:
        """Which shards have a `.weights`, bool [shards]; without one the weights are 1."""
        present: npt.NDArray[np.bool_] = self.rows[CHECKSUM_FIELDS[WEIGHTS]] != 0
        return present

    @cached_property
    def num_tokens(self) -> int:
        return int(self.rows["tokens"].sum())

    @cached_property
    def num_documents(self) -> int:
        return int(self.rows["documents"].sum())

    def hexadecimal(self, column: str) -> list[str]:
        """Return the shards' checksums in the manifest's format."""
        return [f"{number:016x}" for number in self.rows[column].tolist()]


@dataclass(frozen=True)
class ShardTable:
    """Shards of a dataset by split, and its manifest's common data. text_bytes: UTF-8 bytes of the
    documents, by split. labels: names of the labels of classification rows. is_weighted: whether
    losses of tokens have weights other than 0 and 1."""

    tokenizer: TokenizerRecord
    token_dtype: str
    rows: Rows | None
    is_masked: bool
    has_blocks: bool
    splits: Mapping[Split, ShardColumns]
    text_bytes: Mapping[Split, int]
    labels: tuple[str, ...] = ()
    is_weighted: bool = False

    def num_tokens(self, split: Split) -> int:
        return self.splits[split].num_tokens if split in self.splits else 0

    def num_documents(self, split: Split) -> int:
        return self.splits[split].num_documents if split in self.splits else 0

    def num_answers(self, split: Split) -> int:
        """Return the samples of a split: its pairs, or its rated answers."""
        return self.num_documents(split) // documents_per_row(self.rows)


def read_table(directory: Path) -> ShardTable:
    """Return the table of the dataset in `directory`. Raises as `read_manifest`."""
    path = directory / MANIFEST_NAME
    try:
        is_large = path.stat().st_size >= MIN_MANIFEST_BYTES
        name = f"{file_checksum(path)}.shards" if is_large else ""
    except OSError:
        is_large = False
    if is_large:

        def make(file: IO[bytes]) -> None:
            file.write(_pack(read_manifest(directory)))

        table = made_once(cache_locations(directory, DIRECTORY, name), _map, make)
        if table is not None:
            return table
    content = _pack(read_manifest(directory))
    table = _parse(np.frombuffer(content, np.uint8))
    assert table is not None
    return table


def _pack(manifest: Manifest) -> bytes:
    """Return the content of the file of a table."""
    names = bytearray()
    rows = []
    for shards in manifest.splits.values():
        for shard in shards:
            names += shard.name.encode()
            sums = (getattr(shard, column) for column in CHECKSUM_FIELDS.values())
            rows.append(  # in the order of `_COLUMNS`
                (
                    *(shard.tokens, shard.documents, shard.bytes),
                    *(0 if hexadecimal is None else int(hexadecimal, 16) for hexadecimal in sums),
                    len(names),
                )
            )
    head = json.dumps(
        {
            "tokenizer": manifest.tokenizer.model_dump(),
            "token_dtype": manifest.token_dtype,
            "rows": manifest.rows,
            "is_masked": manifest.is_masked,
            "has_blocks": manifest.has_blocks,
            # Absent where it is empty, as in the tables of earlier versions.
            **({"is_weighted": True} if manifest.is_weighted else {}),
            **({"labels": manifest.options.labels} if manifest.options.labels else {}),
            "splits": {split: len(shards) for split, shards in manifest.splits.items()},
            "text_bytes": {
                split: sum(shard.text_bytes for shard in shards)
                for split, shards in manifest.splits.items()
            },
        }
    ).encode()
    head += b" " * (-len(head) % 8)  # aligns the rows
    body = head + np.array(rows, ROW).tobytes() + names
    return _START.pack(MAGIC, len(head), xxhash.xxh3_64_intdigest(body)) + body


def _map(path: Path) -> ShardTable | None:
    """Return the table in a file; None if it is incomplete."""
    try:
        return _parse(np.asarray(np.memmap(path, np.uint8, "r")))
    except (OSError, ValueError):
        return None


def _parse(content: npt.NDArray[np.uint8]) -> ShardTable | None:
    """Return the table in the content of a file; None if it is incomplete or of another version."""
    if len(content) < _START.size:
        return None
    magic, head_bytes, digest = _START.unpack(content[: _START.size].tobytes())
    body = content[_START.size :]
    if magic != MAGIC or xxhash.xxh3_64_intdigest(body.data) != digest:
        return None
    head = json.loads(body[:head_bytes].tobytes())
    counts: dict[Split, int] = head.pop("splits")
    rows_end = head_bytes + sum(counts.values()) * ROW.itemsize
    rows = body[head_bytes:rows_end].view(ROW)
    names = body[rows_end:].data
    splits: dict[Split, ShardColumns] = {}
    first_row = names_begin = 0
    masked, blocks = head["is_masked"], head["has_blocks"]
    are_labeled = head["rows"] in LABELED
    for split, count in counts.items():
        split_rows = rows[first_row : first_row + count]
        splits[split] = ShardColumns(split_rows, names, masked, blocks, names_begin, are_labeled)
        first_row += count
        names_begin = int(split_rows["name_end"][-1]) if count else names_begin
    tokenizer = TokenizerRecord.model_validate(head.pop("tokenizer"))
    label_names = tuple(head.pop("labels", ()))
    return ShardTable(tokenizer=tokenizer, splits=splits, labels=label_names, **head)
