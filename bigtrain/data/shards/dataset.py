"""Datasets of token shards: a directory, its manifest, and the listed shards. numpy only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.format import Shard
from bigtrain.data.shards.manifest import TOKENIZER_DIRECTORY, Manifest, Split, read_manifest
from bigtrain.data.shards.shard_table import ROW, ShardColumns, ShardTable, read_table
from bigtrain.errors import DataError
from bigtrain.settings.run_config import DataSection

Level = Literal["listed", "sizes", "index"]

MAX_OPEN_SHARDS = 4096
"""Shards of a dataset that stay open: each has up to four memory maps, and Linux allows 65,530."""
# On a network, where a check is mostly waiting, many at once take less time; otherwise more.
_FIRST_LOOKS, _SLOW_LOOK_SECONDS, _LOOKING_THREADS = 64, 0.001, 16
MANY_SHARDS = 1000
"""From this number on, only one rank of each host checks all of them."""


class ShardList(Sequence[Shard]):
    """Shards in stream order, of one token type, each opened on first access.

    num_tokens: int64 [shards]. Thread-safe. Accessing one raises DataError if it
    is missing, corrupt, or differs from the manifest.
    """

    def __init__(self, directory: Path, columns: ShardColumns, token_dtype: str) -> None:
        self.dtype = np.dtype(token_dtype).newbyteorder("<")
        self.num_tokens: npt.NDArray[np.int64] = columns.rows["tokens"].astype(np.int64)
        self.is_masked, self.has_blocks = columns.is_masked, columns.has_blocks
        self._directory = directory
        self._paths: list[Path] | None = None
        self._columns = columns
        self._opened: OrderedDict[int, Shard] = OrderedDict()
        self._lock = Lock()

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> ShardList:
        """Build a list of open shards without a dataset and without checksums."""
        rows = np.zeros(len(shards), ROW)
        rows["tokens"] = [shard.num_tokens for shard in shards]
        masked = any(shard.mask_path is not None for shard in shards)
        dtype = shards[0].dtype.name if shards else "uint16"
        shards_of = cls(
            Path(), ShardColumns(rows, memoryview(b""), masked, has_blocks=False), dtype
        )
        shards_of._paths = [shard.bin_path for shard in shards]
        shards_of._opened.update(enumerate(shards))
        return shards_of

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Shard]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(number)
        with self._lock:
            shard = self._opened.get(number)
            if shard is not None:
                self._opened.move_to_end(number)
                return shard
        shard = self._open(number)
        with self._lock:
            self._opened[number] = shard
            if len(self._opened) > MAX_OPEN_SHARDS:
                self._opened.popitem(last=False)
        return shard

    def path(self, number: int, suffix: str) -> Path:
        """Return the path of a file of shard `number`, without checking it."""
        if self._paths is not None:
            return self._paths[number].with_suffix(f".{suffix}")
        return self._directory / f"{self._columns.name(number)}.{suffix}"

    def _open(self, number: int) -> Shard:
        shard = Shard(
            self._directory / self._columns.name(number),
            masked=self.is_masked,
            checksums=self._columns.checksums(number),
        )
        row = self._columns.rows[number]
        for what, actual, expected in (
            ("bytes", shard.num_bytes, int(row["bytes"])),
            ("documents", shard.num_documents, int(row["documents"])),
            ("token type", shard.dtype.name, self.dtype.name),
        ):
            if actual != expected:
                raise DataError(
                    f"{shard.bin_path} is corrupt: {what} {actual}, the manifest has {expected} -> "
                    "remove the dataset and tokenize again"
                )
        return shard


class FilePaths(Sequence[Path]):
    """Paths of one kind of file of all shards, each created on access."""

    def __init__(self, shards: ShardList, suffix: str) -> None:
        self._shards, self._suffix = shards, suffix

    def __len__(self) -> int:
        return len(self._shards)

    @overload
    def __getitem__(self, number: int) -> Path: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Path]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        return self._shards.path(number, self._suffix)


@dataclass(frozen=True)
class TokenDataset:
    """Finished dataset: its manifest's data, and its shards by split in stream order."""

    path: Path
    table: ShardTable
    splits: dict[Split, ShardList]

    def shards(self, split: Split) -> Sequence[Shard]:
        """Return the shards of `split`; empty if the dataset has no such split."""
        return self.splits.get(split, ())

    @cached_property
    def manifest(self) -> Manifest:
        """Read the complete manifest again: seconds and hundreds of megabytes for many shards."""
        return read_manifest(self.path)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_DIRECTORY


def open_dataset(path: str | Path, check: Level = "index") -> TokenDataset:
    """Open the dataset in directory `path`.

    `check`: ``sizes`` compares headers and file sizes with the manifest; ``index`` also reads every
    index; ``listed`` is ``sizes``, but from `MANY_SHARDS` on none is checked before it is read.
    Raises DataError if the directory, the manifest or a shard is missing, corrupt, or differs from
    the manifest, and if the training split has no token.
    """
    directory = Path(path)
    table = read_table(directory)
    if not table.num_tokens("train"):
        raise DataError(f"{directory} is empty: its training split has 0 tokens")
    splits = {
        split: ShardList(directory, columns, table.token_dtype)
        for split, columns in table.splits.items()
    }
    if check != "listed" or sum(map(len, splits.values())) < MANY_SHARDS:
        for shards in splits.values():
            _look_at(shards, check)
    return TokenDataset(directory, table, splits)


def _look_at(shards: ShardList, check: Level) -> None:
    def look(numbers: range) -> None:
        for number in numbers:
            shard = shards[number]
            if check == "index":
                shard.check_index()

    begun = time.perf_counter()
    look(range(min(_FIRST_LOOKS, len(shards))))
    rest = range(_FIRST_LOOKS, len(shards))
    if time.perf_counter() - begun < _FIRST_LOOKS * _SLOW_LOOK_SECONDS:
        look(rest)
        return
    step = -(-len(rest) // (8 * _LOOKING_THREADS)) or 1
    parts = [rest[low : low + step] for low in range(0, len(rest), step)]
    with ThreadPoolExecutor(_LOOKING_THREADS) as threads:
        for _ in threads.map(look, parts):
            pass


def open_sources(data: DataSection) -> tuple[TokenDataset, ...]:
    """Open the datasets of a run's mixture, in its order, checked by sizes only: their data
    is checked when it is read. Raises DataError as `open_dataset`."""
    return tuple(open_dataset(source.path, check="sizes") for source in data.mixture)
