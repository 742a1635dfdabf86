"""Datasets of token shards: a directory, its manifest, and the listed shards. numpy only.

Bytes of files by positioned reads: one system call for each range, and no page faults.

Measured on a dropped page cache (random windows of 4,096 tokens): 59 microseconds each, while a
memory map takes 446. On a warm cache a read of 2,048 tokens takes 2 microseconds, and copying many
at once from a map less than 1 each (`bigtrain.data.samples.token_stream`).
"""

from __future__ import annotations

import errno
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.format import IGNORED_LABEL, TokenShard
from bigtrain.data.shards.manifest import (
    TOKENIZER_DIRECTORY,
    Manifest,
    Split,
    corrupt,
    read_manifest,
    reading,
)
from bigtrain.data.shards.shard_table import ROW, ShardColumns, ShardTable, read_table
from bigtrain.errors import DataError
from bigtrain.settings.run_config import DataSection

Level = Literal["listed", "sizes", "index"]

MAX_OPEN_SHARDS = 4096
"""Shards of a dataset that stay open: each has up to four memory maps, and Linux allows 65,530."""
# Shards that one thread checks first, and the mean time of a check from which more threads check
# further shards: on a network, where a check is mostly waiting, that takes less time.
_FIRST_CHECKED, _SLOW_CHECK_SECONDS, _CHECK_THREADS = 64, 0.001, 16
MANY_SHARDS = 1000
"""From this number on, only one rank of each host checks all of them."""


Document = dict[str, npt.NDArray[Any]]
"""Tokens of a document, with a label and a weight for each token."""


class ShardList(Sequence[TokenShard]):
    """Shards in stream order, of equal token type, each opened on first access. num_tokens: int64
    [shards]. Thread-safe. Accessing a shard raises DataError if it is missing, corrupt, or differs
    from the manifest."""

    def __init__(self, directory: Path, columns: ShardColumns, token_dtype: str) -> None:
        self.dtype = np.dtype(token_dtype).newbyteorder("<")
        self.num_tokens: npt.NDArray[np.int64] = columns.rows["tokens"].astype(np.int64)
        self.is_masked, self.has_blocks = columns.is_masked, columns.has_blocks
        self.have_weights = columns.have_weights
        self._directory = directory
        self._paths: list[Path] | None = None
        self._columns = columns
        # Without a reference to this list, so that files are closed with the last reference to it.
        open_one = partial(_open_shard, directory, columns, self.dtype.name)
        self._open: Callable[[int], TokenShard] = lru_cache(MAX_OPEN_SHARDS)(open_one)

    @classmethod
    def of(cls, shards: Sequence[TokenShard]) -> ShardList:
        """Build a list of open shards without a dataset and without checksums."""
        rows = np.zeros(len(shards), ROW)
        rows["tokens"] = [shard.num_tokens for shard in shards]
        masked = any(shard.mask_path is not None for shard in shards)
        dtype = shards[0].dtype.name if shards else "uint16"
        columns = ShardColumns(rows, memoryview(b""), masked, has_blocks=False)
        opened = cls(Path(), columns, dtype)
        opened._paths = [shard.bin_path for shard in shards]
        opened._open = shards.__getitem__
        return opened

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, number: int) -> TokenShard: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[TokenShard]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._open(number)

    def path(self, number: int, suffix: str) -> Path:
        """Return the path of a file of shard `number`, without checking it."""
        if self._paths is not None:
            return self._paths[number].with_suffix(f".{suffix}")
        return self._directory / f"{self._columns.name(number)}.{suffix}"


def _open_shard(
    directory: Path, columns: ShardColumns, token_dtype: str, number: int
) -> TokenShard:
    """Open a shard of a dataset. Raise DataError if it differs from the manifest."""
    prefix, checksums = directory / columns.name(number), columns.checksums(number)
    shard = TokenShard(prefix, masked=columns.is_masked, checksums=checksums)
    row = columns.rows[number]
    for field_name, actual, expected in (
        ("bytes", shard.num_bytes, int(row["bytes"])),
        ("documents", shard.num_documents, int(row["documents"])),
        ("token type", shard.dtype.name, token_dtype),
    ):
        if actual != expected:
            raise corrupt(shard.bin_path, f"{field_name} {actual}, the manifest has {expected}")
    return shard


class Documents(Sequence[Document]):
    """Documents of shards in stream order, by number: ``input_ids`` int64 [n], with the
    end-of-document token, and ``labels``, the ids with -100 where a token is not learned; for a
    dataset with weights other than 0 and 1 also ``loss_weights``, float32 [n]. Reading a document
    raises DataError as `TokenShard.document`."""

    def __init__(
        self,
        shards: Sequence[TokenShard],
        counts: npt.NDArray[np.int64],
        *,
        are_weighted: bool = False,
    ) -> None:
        self._shards, self._ends = shards, np.cumsum(counts)
        self._are_weighted = are_weighted

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, number: int) -> Document: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Document]: ...
    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        number %= len(self)
        shard_number = int(np.searchsorted(self._ends, number, side="right"))
        num_before = int(self._ends[shard_number - 1]) if shard_number else 0
        shard, index = self._shards[shard_number], number - num_before
        tokens = shard.document(index).astype(np.int64)
        is_learned = shard.document_mask(index)
        document = {"input_ids": tokens, "labels": np.where(is_learned, tokens, IGNORED_LABEL)}
        if self._are_weighted:
            document["loss_weights"] = shard.document_weights(index)
        return document


@dataclass(frozen=True)
class TokenDataset:
    """Finished dataset: its manifest's data, and its shards by split in stream order. Length, items
    and iteration give ``documents("train")``."""

    path: Path
    table: ShardTable
    splits: dict[Split, ShardList]

    def shards(self, split: Split) -> Sequence[TokenShard]:
        """Return the shards of `split`; empty if the dataset does not have the split."""
        return self.splits.get(split, ())

    def documents(self, split: Split = "train") -> Documents:
        """Return the documents of `split`; none if the dataset does not have the split."""
        columns = self.table.splits.get(split)
        counts = np.empty(0, np.int64) if columns is None else columns.rows["documents"]
        shards, are_weighted = self.shards(split), self.table.is_weighted
        return Documents(shards, counts.astype(np.int64), are_weighted=are_weighted)

    @cached_property
    def _training_documents(self) -> Documents:
        return self.documents("train")

    def __len__(self) -> int:
        return len(self._training_documents)

    def __getitem__(self, number: int) -> Document:
        return self._training_documents[number]

    def __iter__(self) -> Iterator[Document]:
        return iter(self._training_documents)

    @cached_property
    def manifest(self) -> Manifest:
        """Read the complete manifest again: seconds and hundreds of megabytes for many shards."""
        return read_manifest(self.path)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_DIRECTORY


def open_dataset(path: str | Path, check: Level = "index") -> TokenDataset:
    """Open the dataset in directory `path`. `check`: ``sizes`` compares headers and file sizes with
    the manifest; ``index`` also reads every index; ``listed`` is ``sizes`` for fewer than
    `MANY_SHARDS` shards, and no check for more: each is checked when it is read. Raises DataError
    if the directory, the manifest or a shard is missing, corrupt, or differs from the manifest, and
    if the training split has no token."""
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
            _check_shards(shards, check)
    return TokenDataset(directory, table, splits)


def _check_shards(shards: ShardList, check: Level) -> None:
    """Open every shard; read its index for the level ``index``. Raise DataError."""

    def check_range(numbers: range) -> None:
        for number in numbers:
            shard = shards[number]  # opening compares it with the manifest
            if check == "index":
                shard.check_index()

    # Whether this user may read the first shards, before a check that may take hours.
    for number in range(min(_FIRST_CHECKED, len(shards))):
        path = shards[number].bin_path
        with reading(path):
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    # The first shards also show whether the storage is slow: then many threads wait at once.
    start_time = time.perf_counter()
    check_range(range(min(_FIRST_CHECKED, len(shards))))
    remaining = range(_FIRST_CHECKED, len(shards))
    if time.perf_counter() - start_time < _FIRST_CHECKED * _SLOW_CHECK_SECONDS:
        check_range(remaining)
        return
    # Eight parts for each thread, since some take longer.
    step = -(-len(remaining) // (8 * _CHECK_THREADS)) or 1
    parts = [remaining[low : low + step] for low in range(0, len(remaining), step)]
    with ThreadPoolExecutor(_CHECK_THREADS) as threads:
        for _ in threads.map(check_range, parts):
            pass


def open_sources(data: DataSection) -> tuple[TokenDataset, ...]:
    """Open the datasets of a run's mixture, in its order, checked by sizes only: their data
    is checked when it is read. Raises DataError as `open_dataset`."""
    return tuple(open_dataset(source.path, check="sizes") for source in data.mixture)


MAX_OPEN_FILES = 64
"""Open files of a reader; many systems allow a process 1,024, and it has other files."""


class FileReader:
    """Reader of several files, with at most `MAX_OPEN_FILES` open between reads. Thread-safe."""

    def __init__(self, path: Callable[[int], Path]) -> None:
        self._path = path
        # A file that is dropped here while a thread reads it is closed with its last reference.
        self._open = lru_cache(MAX_OPEN_FILES)(lambda number: _File(path(number)))

    def read(
        self,
        numbers: Sequence[int],
        positions: Sequence[int],
        out: memoryview,
        begins: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """Fill ``out[begins[i] : ends[i]]`` with bytes of file ``numbers[i]`` from ``positions[i]``
        on, for every i. Raises DataError if a file cannot be read or is shorter."""
        opened: dict[int, _File] = {}
        read = os.preadv
        for number, position, begin, end in zip(numbers, positions, begins, ends, strict=True):
            try:
                file = opened.get(number)
                if file is None:
                    file = opened[number] = self._open(number)
                count = read(file.descriptor, (out[begin:end],), position)
                # A short read: over 2 GiB, on a network, or at the end of the file.
                while count < end - begin:
                    num_read = read(file.descriptor, (out[begin + count : end],), position + count)
                    if not num_read:
                        size = os.fstat(file.descriptor).st_size
                        raise DataError(
                            f"{file.path} ends at byte {size}; it was longer when it was opened -> "
                            "do not change a dataset while it is being read"
                        )
                    count += num_read
            except OSError as error:
                raise DataError(f"{self._path(number)} cannot be read: {error}") from error

    def read_range(self, number: int, low: int, high: int) -> memoryview:
        """Return bytes `low` to `high` of file `number`. Raises as `read`."""
        out = memoryview(bytearray(high - low))
        self.read([number], [low], out, [0], [high - low])
        return out


class _File:
    """Open file, closed with its last reference."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "descriptor"):  # otherwise opening failed
            close(self.descriptor)
