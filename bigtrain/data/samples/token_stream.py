"""Token stream: documents concatenated, then split into samples of fixed length. numpy only.

The documents of a split form one stream of tokens, and sample ``w`` is its window
``[w * L, w * L + L + 1)`` for sequence length ``L``, as in Megatron's GPTDataset: consecutive
windows share one token, so every token but the first of the stream is predicted exactly once.

The loader reads any kind of `Samples`: it fills rows of tokens, many at a time. Shapes: R = rows of
a buffer, T = sequence length. A row is T + 1 tokens: T inputs, and the last label.
"""

from __future__ import annotations

import os
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.block_checksums import BlockVerifier
from bigtrain.data.shards.dataset import FileReader, ShardList, TokenDataset
from bigtrain.data.shards.format import Mask, Weights
from bigtrain.data.shards.manifest import REBUILD, Split
from bigtrain.errors import DataError

Indices = npt.NDArray[np.int64]


@dataclass
class TokenRows:
    """Buffer into which samples are written, reused for the next samples.

    tokens: [R, T + 1], contiguous, of the samples' `token_dtype`. begins: starts of documents, as
    positions ``row * (T + 1) + t``, in any order; None if not needed. The first token of a row
    may be omitted. loss_mask: bool [R, T + 1], true if the token is a target, and
    everywhere before filling; None if `Samples.masks_loss` is not set. weights: float32
    [R, T + 1], weights of the losses of targets, and 1 everywhere before filling; None if
    `Samples.weighs_loss` is not set.
    """

    tokens: npt.NDArray[np.unsignedinteger[Any] | np.signedinteger[Any]]
    begins: list[Indices] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = None
    weights: Weights | None = None


class Samples(Protocol):
    """Samples of equal length that the loader reads by number, from 0. token_dtype: uint16 or
    int32, the smallest type for all tokens. vocab_size: tokens are below it, which the loader
    checks. masks_loss: whether `fill` writes `TokenRows.loss_mask`; weighs_loss: whether it writes
    `TokenRows.weights`, and then it masks losses, too."""

    num_samples: int
    sequence_length: int
    token_dtype: np.dtype[Any]
    vocab_size: int
    masks_loss: bool
    weighs_loss: bool

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        """Write sample ``samples[i]`` into row ``rows[i]`` of `out`: all tokens, and all fields of
        `out` that are set. Thread-safe with one buffer per thread. Raises DataError if a file
        cannot be read or is inconsistent."""

    def describe(self, sample: int) -> str:
        """Return the files and ranges of the tokens of `sample`, for an error."""


Tokens = npt.NDArray[Any]
Sums = npt.NDArray[np.uint64]

MAX_MAPPED_FILES = 4096
"""Memory maps of a stream; Linux allows a process 65,530."""
MIN_ROWS_OF_SHARD = 4
"""Minimum mean number of rows per shard. Copying from a map costs some microseconds per shard, as
much as reading a few rows."""
COLD_PAGES_OF_ROW = 0.25
"""Mean number of pages per row that copying from maps may fetch from disk. Then a row was measured
to take 160 to 450 microseconds; a read takes 60, and copying from memory about one."""
READS_AFTER_COLD_MAP = 64
"""Calls of `read_rows` that read after a call that fetched more pages."""
GATHERED_TOKENS = 1 << 15
"""Tokens copied at a time: more are copied at half the speed, into newly allocated memory."""


@dataclass(frozen=True)
class Ranges:
    """Ranges of tokens, int64 [ranges]: number of shard or sample, first token, number of tokens,
    and position in the target."""

    numbers: Indices
    starts: Indices
    lengths: Indices
    positions: Indices

    def put(self, stored: Tokens | Mask, begins: Indices, out: Tokens | Mask) -> None:
        """Copy the parts, which are in `stored` from `begins` on, to their positions in `out`."""
        for position, begin, length in zip(
            self.positions.tolist(), begins.tolist(), self.lengths.tolist(), strict=True
        ):
            out[position : position + length] = stored[begin : begin + length]

    def select(self, is_selected: npt.NDArray[np.bool_]) -> Ranges:
        """Return some of the ranges."""
        return Ranges(*(getattr(self, field.name)[is_selected] for field in fields(Ranges)))

    def scaled(self, factor: int) -> Ranges:
        """Return the ranges in bytes, for tokens with values of `factor` bytes."""
        return Ranges(
            self.numbers, self.starts * factor, self.lengths * factor, self.positions * factor
        )

    @staticmethod
    def join(parts: Sequence[Ranges]) -> Ranges:
        names = [field.name for field in fields(Ranges)]
        return Ranges(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


class TokenStream:
    """Tokens of `shards`, one after another. Thread-safe."""

    def __init__(self, shards: ShardList, vocab_size: int) -> None:
        self.shards = shards
        self.vocab_size = vocab_size
        self.token_dtype = shards.dtype
        self.is_masked = shards.is_masked and len(shards) > 0
        self.is_weighted = bool(shards.have_weights.any())
        # Files of a value per token; absent ones have no bytes.
        sizes = shards.num_tokens
        self._bin = _ShardFiles(shards, "bin", sizes * self.token_dtype.itemsize)
        self._mask = _ShardFiles(shards, "mask", -(-sizes // 8) * self.is_masked)
        self._weights = _ShardFiles(shards, "weights", 4 * sizes * shards.have_weights)
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._begins = self._ends - sizes
        self.num_tokens = int(sizes.sum())
        # Calls of `read_rows` before the next one copies from memory maps.
        self._reads_to_map = 0 if len(self.shards) <= MAX_MAPPED_FILES else sys.maxsize

    def read_rows(self, starts: Indices, out: Tokens, rows: Indices) -> None:
        """Copy the tokens of a row of `out`, from ``starts[i]`` on to ``out[rows[i]]``. `out`:
        two-dimensional and contiguous; see `read`."""
        width = out.shape[1]
        self._reads_to_map -= 1
        if self._reads_to_map < 0 and len(starts):
            unread = self._copy_mapped(starts, out, rows)
            starts, rows = starts[unread], rows[unread]
        if len(starts):
            self.read(starts, np.full(len(starts), width), out.reshape(-1), rows * width)

    def _copy_mapped(self, starts: Indices, out: Tokens, rows: Indices) -> Indices:
        """Copy rows from memory maps; return the indices of rows that `read` must copy. Copying is
        several times faster than reading if the pages are in memory; if not, a page fault costs
        more than a read, and the next calls read."""
        width = out.shape[1]
        # Find the shard of every row, -1 for a row that `read` must copy. A few rows of every shard
        # are not worth the cost per map.
        numbers = np.searchsorted(self._ends, starts, side="right")
        numbers[starts + width > self._ends[numbers]] = -1  # continues in the next shard
        shard_numbers = [int(numbers.max())]  # of a stream with one shard, without sorting
        if len(self.shards) > 1:
            shard_numbers = np.unique(numbers).tolist()
        if len(starts) < MIN_ROWS_OF_SHARD * len(shard_numbers):
            return np.arange(len(starts))
        # Major page faults of this thread wait for a disk.
        faults_before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        step = max(1, GATHERED_TOKENS // (width - 1))
        for number in shard_numbers:
            windows = self._mapped_windows(number, width) if number >= 0 else None
            row_indices = np.flatnonzero(numbers == number)
            if windows is None:  # also for the number -1
                numbers[row_indices] = -1
                continue
            out_rows, begins = rows[row_indices], starts[row_indices] - self._begins[number]
            self._verify_mapped(number, begins, width)
            # numpy gathers into separate memory before it copies.
            for low in range(0, len(row_indices), step):
                out[out_rows[low : low + step]] = windows[begins[low : low + step]]
        # Pages came from the disk: the next calls read instead.
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - faults_before
        if faults > len(starts) * COLD_PAGES_OF_ROW:
            self._reads_to_map = READS_AFTER_COLD_MAP
        return np.flatnonzero(numbers < 0)

    def _verify_mapped(self, number: int, begins: Indices, width: int) -> None:
        """Verify windows of one shard by its map; the caller has checked the length of the file."""
        if self._bin.verifier is not None:
            token_bytes, content = self.token_dtype.itemsize, self.shards[number].token_bytes
            low, high = begins * token_bytes, (begins + width) * token_bytes
            self._bin.verifier.verify(number, low, high, lambda _, a, b: content[a:b])

    def _mapped_windows(self, number: int, width: int) -> Tokens | None:
        """Return every range of `width` tokens of a shard, as a view of its map. None if its file
        was truncated: its missing pages would crash the process, while a read reports the error."""
        shard = self.shards[number]
        try:
            if os.stat(shard.bin_path).st_size < shard.num_bytes:
                return None
        except OSError:
            return None
        token_bytes = self.token_dtype.itemsize
        shape = shard.num_tokens - width + 1, width
        return np.ndarray(shape, self.token_dtype, shard.tokens, strides=(token_bytes, token_bytes))

    def read(self, starts: Indices, lengths: Indices, out: Tokens, positions: Indices) -> None:
        """Copy ranges of the stream: ``lengths[i]`` tokens from ``starts[i]`` on to
        ``out[positions[i]:]``. `out`: one-dimensional and contiguous, of the stream's type or a
        wider type. Raises DataError if a shard cannot be read."""
        parts = self._cut(starts, lengths, positions)
        if out.dtype == self.token_dtype:
            self._bin.read(parts.scaled(self.token_dtype.itemsize), out)
            return
        # `out` has a wider type: read all parts one after another, then convert them.
        packed_begins = np.cumsum(parts.lengths) - parts.lengths
        stored = np.empty(int(parts.lengths.sum()), self.token_dtype)
        self._bin.read(replace(parts, positions=packed_begins).scaled(stored.itemsize), stored)
        parts.put(stored, packed_begins, out)

    def read_mask(self, starts: Indices, lengths: Indices, out: Mask, positions: Indices) -> None:
        """Copy which tokens of ranges of the stream are targets, like `read` for tokens. `out`:
        bool, one-dimensional. Only if `is_masked`."""
        parts = self._cut(starts, lengths, positions)
        # A byte of the file has the bits of 8 tokens: read all bytes with a bit of a range.
        first_bytes = parts.starts // 8
        num_bytes = (parts.starts + parts.lengths + 7) // 8 - first_bytes
        begins = np.cumsum(num_bytes) - num_bytes
        packed_bytes = np.empty(int(num_bytes.sum()), np.uint8)
        self._mask.read(Ranges(parts.numbers, first_bytes, num_bytes, begins), packed_bytes)
        bits = np.unpackbits(packed_bytes, bitorder="little").view(np.bool_)
        parts.put(bits, 8 * begins + parts.starts % 8, out)

    def read_weights(
        self, starts: Indices, lengths: Indices, out: Weights, positions: Indices
    ) -> None:
        """Copy the weights of the losses in ranges of the stream, like `read` for tokens. `out`:
        float32, one-dimensional and contiguous, 1 where a shard without weights is read."""
        parts = self._cut(starts, lengths, positions)
        parts = parts.select(self.shards.have_weights[parts.numbers] & (parts.lengths > 0))
        self._weights.read(parts.scaled(4), out)

    def begins(self, starts: Indices, lengths: Indices, positions: Indices) -> Indices:
        """Return the document starts in ranges of the stream, int64: token ``starts[i] + j`` as
        ``positions[i] + j``, in any order. Raises DataError if an index is inconsistent there."""
        parts = self._cut(starts, lengths, positions)
        low, high = parts.starts, parts.starts + parts.lengths
        byte_offsets: list[int] = []
        counts: list[int] = []
        for number, first, end in zip(
            parts.numbers.tolist(), low.tolist(), high.tolist(), strict=True
        ):
            shard_begins = self.shards[number].document_begins(first, end)
            byte_offsets += shard_begins
            counts.append(len(shard_begins))
        begins = np.array(byte_offsets, np.int64) // self.token_dtype.itemsize
        range_number = np.repeat(np.arange(len(counts)), counts)
        # The search requires ordered pointers.
        is_falling = (begins[1:] < begins[:-1]) & (range_number[1:] == range_number[:-1])
        is_outside = (begins < low[range_number]) | (begins >= high[range_number])
        if is_falling.any() or is_outside.any():
            files = ", ".join(sorted({str(self.shards[n].index_path) for n in parts.numbers}))
            raise DataError(
                f"{files}: an index is corrupt: documents are out of order -> {REBUILD}"
            )
        return begins + (parts.positions - low)[range_number]

    def describe(self, start: int, length: int) -> str:
        """Describe a range of the stream by files and their tokens."""
        parts = self._cut(np.array([start]), np.array([length]), np.array([0]))
        return " and ".join(
            f"tokens {offset} to {offset + count} of {self.shards[number].bin_path}"
            for number, offset, count in zip(
                parts.numbers, parts.starts, parts.lengths, strict=True
            )
        )

    def _cut(self, starts: Indices, lengths: Indices, positions: Indices) -> Ranges:
        """Convert ranges of the stream to ranges of shards, split at shard boundaries."""
        assert not len(starts) or 0 <= starts.min() <= (starts + lengths).max() <= self.num_tokens
        parts = []
        while True:  # parts in the first shard of every range, in the second shard, and so forth
            numbers = np.searchsorted(self._ends, starts, side="right")
            in_shard = np.minimum(lengths, self._ends[numbers] - starts)  # tokens in this shard
            parts.append(Ranges(numbers, starts - self._begins[numbers], in_shard, positions))
            unfinished = np.flatnonzero(in_shard < lengths)
            if not len(unfinished):
                return parts[0] if len(parts) == 1 else Ranges.join(parts)
            starts = (starts + in_shard)[unfinished]
            positions = (positions + in_shard)[unfinished]
            lengths = (lengths - in_shard)[unfinished]


class _ShardFiles:
    """Files with `suffix` of `shards`, of `sizes` bytes. verifier: of the blocks that are read, if
    the shards have checksums of blocks, and some shard has the file."""

    def __init__(self, shards: ShardList, suffix: str, sizes: Indices) -> None:
        path = partial(shards.path, suffix=suffix)
        self._shards, self._suffix = shards, suffix
        self._reader = FileReader(path)
        self.verifier = None
        if shards.has_blocks and sizes.any():
            self.verifier = BlockVerifier(path, sizes, self._block_sums)

    def _block_sums(self, number: int) -> tuple[Path, Sums]:
        """Return the `.blocks` file of a shard, and its checksums for this file; see
        `BlockVerifier`."""
        sums = self._shards[number].block_sums
        assert sums is not None
        return sums.path, getattr(sums, f"{self._suffix}_sums")

    def read(self, parts: Ranges, out: npt.NDArray[Any]) -> None:
        """Copy ranges of bytes, whose positions are bytes of `out`; verify them first."""
        low, high = parts.starts, parts.starts + parts.lengths
        if self.verifier is not None:
            self.verifier.verify(parts.numbers, low, high, self._reader.read_range)
        ends = parts.positions + parts.lengths
        self._reader.read(
            parts.numbers.tolist(),
            low.tolist(),
            out.view(np.uint8).data,
            parts.positions.tolist(),
            ends.tolist(),
        )


def split_stream(dataset: TokenDataset, split: Split) -> TokenStream:
    """Return the stream of a split of `dataset`; empty if there is no such split."""
    shards = dataset.splits.get(split) or ShardList.of([])
    return TokenStream(shards, dataset.table.tokenizer.vocab_size)


class StreamSamples(ABC):
    """Base of the samples of a stream. A sample consists of ranges of the stream's tokens.
    length_note: how truncation of long documents changes them, empty if it does not. labels:
    uint8 [samples], if samples have labels."""

    length_note = ""
    labels: npt.NDArray[np.uint8] | None = None

    def __init__(
        self, stream: TokenStream, sequence_length: int, num_samples: int, masks_loss: bool = True
    ) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.num_samples = num_samples
        self.masks_loss = masks_loss
        self.weighs_loss = stream.is_weighted
        self.token_dtype = stream.token_dtype
        self.vocab_size = stream.vocab_size

    @abstractmethod
    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        """Write samples into rows; see `Samples`."""

    @abstractmethod
    def _pieces(self, samples: Indices) -> Ranges:
        """Return the ranges of `samples` by their index, and their positions in a row."""

    def describe(self, sample: int) -> str:
        pieces = self._pieces(np.array([sample]))
        ranges = zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
        return " and ".join(self.stream.describe(start, length) for start, length in ranges)

    def _read(self, pieces: Ranges, rows: Indices, out: TokenRows) -> tuple[Indices, Mask]:
        """Read tokens and mask of `pieces`; return their positions in `out`, and its flat mask."""
        # The row in `out` of each piece's sample, and where in the row the piece begins.
        row_of_piece = rows[pieces.numbers]
        positions = row_of_piece * (self.sequence_length + 1) + pieces.positions
        self.stream.read(pieces.starts, pieces.lengths, out.tokens.reshape(-1), positions)
        assert out.loss_mask is not None
        loss_mask = out.loss_mask.reshape(-1)
        if self.stream.is_masked:
            self.stream.read_mask(pieces.starts, pieces.lengths, loss_mask, positions)
        if out.weights is not None:
            self.stream.read_weights(
                pieces.starts, pieces.lengths, out.weights.reshape(-1), positions
            )
        return positions, loss_mask


class PackedWindows(StreamSamples):
    """Windows of `sequence_length` + 1 tokens, `sequence_length` apart, of one stream, in complete
    chunks of `chunk_length` tokens, a multiple of `sequence_length` (default: equal). Raises
    DataError if the stream is too short for a single window."""

    def __init__(
        self, stream: TokenStream, sequence_length: int, chunk_length: int | None = None
    ) -> None:
        chunk_length = chunk_length or sequence_length
        assert chunk_length % sequence_length == 0
        num_chunks = count_windows(stream.num_tokens, chunk_length)
        num_samples = num_chunks * (chunk_length // sequence_length)
        super().__init__(stream, sequence_length, num_samples, stream.is_masked)
        if not self.num_samples:
            key = (
                "batch.sequence_length" if chunk_length == sequence_length else "data.chunk_length"
            )
            raise DataError(
                f"{stream.num_tokens} tokens are too few for one sample: {key} = {chunk_length} "
                f"needs {chunk_length + 1} -> tokenize more text or set a smaller {key}"
            )

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        assert not len(samples) or 0 <= samples.min() <= samples.max() < self.num_samples
        starts, width = samples * self.sequence_length, self.sequence_length + 1
        self.stream.read_rows(starts, out.tokens, rows)
        lengths = np.full(len(samples), width)
        if self.masks_loss:
            assert out.loss_mask is not None
            self.stream.read_mask(starts, lengths, out.loss_mask.reshape(-1), rows * width)
        if out.weights is not None:
            self.stream.read_weights(starts, lengths, out.weights.reshape(-1), rows * width)
        if out.begins is not None:
            out.begins.append(self.stream.begins(starts, lengths, rows * width))

    def _pieces(self, samples: Indices) -> Ranges:
        numbers, starts = np.arange(len(samples)), samples * self.sequence_length
        lengths = np.full_like(samples, self.sequence_length + 1)
        return Ranges(numbers, starts, lengths, positions=np.zeros_like(samples))


def count_windows(num_tokens: int, sequence_length: int) -> int:
    """Return the windows of `sequence_length` inputs and labels in a stream of `num_tokens`."""
    return max(0, num_tokens - 1) // sequence_length
