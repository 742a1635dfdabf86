"""Datasets of token shards: a directory, its manifest, and the shards that it lists. numpy only."""

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
"""Of a dataset that stay open: each has up to four memory maps, and Linux allows 65,530."""
# Where a look is mostly waiting, as on a network, many at once take less time; else they take more.
_FIRST_LOOKS, _SLOW_LOOK_SECONDS, _LOOKING_THREADS = 64, 0.001, 16
MANY_SHARDS = 1000
"""From here on, to look at all of them is left to one rank of each host."""


class ShardList(Sequence[Shard]):
    """Shards in stream order, of one token type, each opened when it is asked for.

    num_tokens: int64 [shards]. For any number of threads. Asking for one raises DataError where it
    is missing, corrupt, or not what the manifest says.
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
        """Of shards that are open, without a dataset around them; without checksums."""
        rows = np.zeros(len(shards), ROW)
        rows["tokens"] = [shard.num_tokens for shard in shards]
        masked = any(shard.mask_path is not None for shard in shards)
        dtype = shards[0].dtype.name if shards else "uint16"
        found = cls(Path(), ShardColumns(rows, memoryview(b""), masked, has_blocks=False), dtype)
        found._paths = [shard.bin_path for shard in shards]
        found._opened.update(enumerate(shards))
        return found

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
        """Of a file of shard `number`; it is not looked at."""
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
        for what, found, expected in (
            ("bytes", shard.num_bytes, int(row["bytes"])),
            ("documents", shard.num_documents, int(row["documents"])),
            ("token type", shard.dtype.name, self.dtype.name),
        ):
            if found != expected:
                raise DataError(
                    f"{shard.bin_path} is corrupt: {what} {found}, the manifest says {expected} -> "
                    "remove the dataset and tokenize again"
                )
        return shard


class FilePaths(Sequence[Path]):
    """The paths of one kind of file of all shards, each made when it is asked for."""

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
    """A finished dataset: what its manifest says, and its shards by split in stream order."""

    path: Path
    table: ShardTable
    splits: dict[Split, ShardList]

    def shards(self, split: Split) -> Sequence[Shard]:
        """The shards of `split`; none where the dataset has no such split."""
        return self.splits.get(split, ())

    @cached_property
    def manifest(self) -> Manifest:
        """All of it, read anew: seconds and hundreds of megabytes where there are many shards."""
        return read_manifest(self.path)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_DIRECTORY


def open_dataset(path: str | Path, check: Level = "index") -> TokenDataset:
    """The dataset in directory `path`.

    `check`: ``sizes`` compares headers and file sizes with the manifest; ``index`` also reads every
    index; ``listed`` is ``sizes``, but of `MANY_SHARDS` none is looked at before it is read. Raises
    DataError where the directory, the manifest or a shard is missing, corrupt, or not what the
    manifest says, and where the training split holds no token.
    """
    directory = Path(path)
    table = read_table(directory)
    if not table.num_tokens("train"):
        raise DataError(f"{directory} is empty: its training split holds 0 tokens")
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
    """The datasets of a run's mixture, in its order, checked by sizes alone: what is read of them
    is checked when it is. Raises DataError as `open_dataset`."""
    return tuple(open_dataset(source.path, check="sizes") for source in data.mixture)
