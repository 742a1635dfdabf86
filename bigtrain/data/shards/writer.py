"""Writer of token shards, in the format of `bigtrain.data.shards.format`. numpy only."""

from __future__ import annotations

import os
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.shards.block_checksums import SUFFIX, BlockHasher, blocks_content
from bigtrain.data.shards.format import (
    DTYPE_CODES,
    HEADER,
    INDEX_VERSION,
    MAGIC,
    Mask,
    Tokens,
    Weights,
)
from bigtrain.data.shards.manifest import CHECKSUM_FIELDS, ShardRecord
from bigtrain.errors import DataError

SYNC_BYTES = 1 << 24
"""Bytes of a file being written after which they are synced to the disk."""


class _HashingFile:
    """File being written, with the XXH3-64 of its content and every block. A thread syncs the file
    to the disk during writing: a single sync at the end would take half as long as encoding."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb", buffering=0)
        self.hash = xxhash.xxh3_64()
        self.blocks = BlockHasher()
        self._unsynced = 0
        self._pool: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None

    def write(self, data: bytes | memoryview) -> None:
        """Write `data`. Raise OSError also for failed writes of earlier data."""
        unwritten = memoryview(data)
        while len(unwritten):
            unwritten = unwritten[self.file.write(unwritten) :]
        self.hash.update(data)
        self.blocks.update(memoryview(data))
        self._unsynced += len(data)
        if self._unsynced >= SYNC_BYTES and (self._syncing is None or self._syncing.done()):
            self._await_sync()
            self._pool = self._pool or ThreadPoolExecutor(1)
            self._syncing = self._pool.submit(os.fdatasync, self.file.fileno())
            self._unsynced = 0

    def close(self) -> None:
        """Wait for the thread; raises as `write`."""
        try:
            self._await_sync()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self.file.close()

    def _await_sync(self) -> None:
        if self._syncing is not None:
            syncing, self._syncing = self._syncing, None
            syncing.result()


class _MaskFile:
    """`.mask` being written: one bit per token, eight per byte."""

    def __init__(self, path: Path) -> None:
        self.part = _HashingFile(path)
        self.num_targets = 0
        self._unwritten_bits = np.empty(0, np.bool_)

    def add(self, mask: Mask) -> None:
        self.num_targets += int(np.count_nonzero(mask))
        bits = np.concatenate([self._unwritten_bits, mask])
        num_full_bits = len(bits) // 8 * 8
        self.part.write(np.packbits(bits[:num_full_bits], bitorder="little").data)
        self._unwritten_bits = bits[num_full_bits:].copy()

    def finish(self) -> None:
        self.part.write(np.packbits(self._unwritten_bits, bitorder="little").data)


class ShardWriter:
    """Writer of a shard, in memory bounded by the number of its documents (12 bytes each).
    `masked`: with a `.mask`, `labeled`: with a `.labels`; a `.weights` is made if there are some
    other than 0 and 1. The files have temporary names until `close`; leaving the ``with`` block by
    an exception removes them."""

    def __init__(
        self,
        directory: Path,
        name: str,
        dtype: Literal["uint16", "int32"],
        *,
        masked: bool = False,
        labeled: bool = False,
    ) -> None:
        self.directory = directory
        self.name = name
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = 0
        self.num_documents = 0
        self.text_bytes = 0
        self._lengths = array("i")
        self._document_starts = array("q", [0])
        self._bin = _HashingFile(self._partial("bin"))
        self._mask = _MaskFile(self._partial("mask")) if masked else None
        self._labels = _HashingFile(self._partial("labels")) if labeled else None
        self._weights: _HashingFile | None = None
        self._desirable = 0

    def add(
        self,
        tokens: Tokens,
        lengths: npt.NDArray[np.int64],
        text_bytes: int,
        *,
        mask: Mask | None = None,
        labels: npt.NDArray[np.uint8] | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Append documents: their `tokens`, their `lengths`, and their UTF-8 bytes. A
        length of zero is a document without a sequence. `tokens` must fit the shard's type. `mask`,
        bool [tokens]: which tokens have a loss; passed if and only if the shard is masked.
        `labels`: uint8 [documents], if and only if the shard is labeled. `weights`: float32
        [tokens], of the losses, if some are not 1; only for a masked shard."""
        assert int(lengths.sum()) == len(tokens)
        assert (mask is None) == (self._mask is None)
        assert (labels is None) == (self._labels is None)
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise DataError(
                f"a document of {int(lengths.max())} tokens: the format holds at most 2^31 - 1 -> "
                "split it"
            )
        # Tokens and their optional files.
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data.cast("B"))
        if self._mask is not None and mask is not None:
            assert len(mask) == len(tokens)
            self._mask.add(mask)
        if self._labels is not None and labels is not None:
            assert len(labels) == len(lengths)
            self._labels.write(np.ascontiguousarray(labels).data)
            self._desirable += int((labels == 1).sum())
        self._add_weights(weights, mask)
        # The index, in memory until `close`: an empty document has no sequence. The next document
        # starts at the sequence after the last one of this document.
        is_filled = lengths > 0
        sequence_ends = len(self._lengths) + np.cumsum(is_filled)
        self._lengths.frombytes(lengths[is_filled].astype(np.int32).tobytes())
        self._document_starts.frombytes(sequence_ends.astype(np.int64).tobytes())
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths)
        self.text_bytes += text_bytes

    def _add_weights(self, weights: Weights | None, mask: Mask | None) -> None:
        """Append the weights of tokens, before they are counted in `num_tokens`. The file is made
        for the first weight other than 1, with 1 for all earlier tokens."""
        if mask is None:
            assert weights is None
            return
        if weights is None and self._weights is None:  # all weights so far are 1
            return
        weights = np.where(mask, 1 if weights is None else weights, 1).astype("<f4")
        if self._weights is None:
            if (weights == 1).all():
                return
            self._weights = _HashingFile(self._partial("weights"))
            for begin in range(0, self.num_tokens, SYNC_BYTES):
                count = min(SYNC_BYTES, self.num_tokens - begin)
                self._weights.write(np.ones(count, "<f4").data.cast("B"))
        self._weights.write(weights.data.cast("B"))

    def close(self) -> ShardRecord:
        """Write the index, give all files their names, and return the manifest entry."""
        # The index: byte offsets follow from the lengths.
        index = _HashingFile(self._partial("idx"))
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        starts = np.frombuffer(self._document_starts, dtype=np.int64)
        code = next(code for code, dtype in DTYPE_CODES.items() if dtype == self.dtype)
        index.write(HEADER.pack(MAGIC, INDEX_VERSION, code, len(lengths), len(starts)))
        index.write(lengths.astype("<i4").tobytes())
        index.write(pointers.astype("<i8").tobytes())
        index.write(starts.astype("<i8").tobytes())
        # Checksums of blocks: of every file with a value per token.
        files = [(self._bin, "bin"), (index, "idx")]
        mask_sums = None
        if self._mask is not None:
            self._mask.finish()
            files.append((self._mask.part, "mask"))
            mask_sums = self._mask.part.blocks.finish()
        blocks = _HashingFile(self._partial(SUFFIX))
        weights_sums = None if self._weights is None else self._weights.blocks.finish()
        blocks.write(blocks_content(self._bin.blocks.finish(), mask_sums, weights_sums))
        files.append((blocks, SUFFIX))
        if self._weights is not None:
            files.append((self._weights, "weights"))
        if self._labels is not None:
            files.append((self._labels, "labels"))
        for file, suffix in files:
            file.close()
            self._partial(suffix).rename(self.directory / f"{self.name}.{suffix}")
        return ShardRecord(
            name=self.name,
            documents=self.num_documents,
            tokens=self.num_tokens,
            bytes=self.num_tokens * self.dtype.itemsize,
            text_bytes=self.text_bytes,
            xxh3=self._bin.hash.hexdigest(),
            index_xxh3=index.hash.hexdigest(),
            mask_xxh3=self._mask.part.hash.hexdigest() if self._mask else None,
            target_tokens=self._mask.num_targets if self._mask else None,
            blocks_xxh3=blocks.hash.hexdigest(),
            labels_xxh3=self._labels.hash.hexdigest() if self._labels else None,
            desirable=self._desirable if self._labels else None,
            weights_xxh3=self._weights.hash.hexdigest() if self._weights else None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove files without a final name; files that `close` finished remain."""
        with suppress(OSError):  # the writer is discarded anyway
            self._bin.close()
        if self._mask is not None:
            with suppress(OSError):
                self._mask.part.close()
        for file in (self._labels, self._weights):
            if file is not None:
                with suppress(OSError):
                    file.close()
        for suffix in CHECKSUM_FIELDS:
            self._partial(suffix).unlink(missing_ok=True)

    def _partial(self, suffix: str) -> Path:
        return self.directory / f"{self.name}.{suffix}.partial"
