"""Collation of rows of tokens to the tensors of a forward pass, many rows at a time.

`BatchReader` reads and checks rows in their stored type, in a thread, long before they are needed.
`Collator` creates the int64 tensors of a step, four to eight times as many bytes, when the step
begins, in memory that is still in the CPU's cache from the last step.

Shapes: R = rows, B = samples of a micro-batch, T = sequence length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.samples.token_stream import Indices, Samples, TokenRows
from bigtrain.data.shards.format import IGNORED_LABEL, Weights
from bigtrain.data.shards.manifest import REBUILD
from bigtrain.errors import DataError

CHUNK_TOKENS = 1 << 19
"""Tokens that are read and checked at a time: as many as fit into a core's cache, with few
numpy calls, each of which releases and reacquires the GIL."""

COLLATED_TOKENS = 1 << 17
"""Tokens converted to int64 tensors at a time, which also fit into a core's cache."""

MAX_KEPT_ARRAYS = 12
"""Arrays of earlier steps that are kept for reuse: up to three for each step in flight."""


@dataclass(frozen=True)
class BatchOptions:
    """Options for labels and positions. end_of_document_id: set if the token after it has no loss
    (Megatron's ``eod_mask_loss``). isolate: isolate documents, see `MicroBatch`. pin: page-locked
    tensors (CUDA only)."""

    end_of_document_id: int | None = None
    isolate: bool = False
    pin: bool = False


@dataclass(frozen=True)
class StoredRows:
    """Rows that were read and checked, before conversion to tensors. tokens: [R, T + 1], of the
    samples' `token_dtype`. targets: bool [R, T + 1], whether a token is a target; None if all are.
    positions: [R, T], of the narrowest unsigned type; None unless documents are isolated. weights:
    float32 [R, T + 1], of the losses of the targets; None if all are 1."""

    tokens: npt.NDArray[np.unsignedinteger[Any] | np.signedinteger[Any]]
    targets: npt.NDArray[np.bool_] | None
    positions: npt.NDArray[np.unsignedinteger[Any]] | None
    weights: Weights | None = None

    def part(self, low: int, high: int) -> StoredRows:
        return StoredRows(
            self.tokens[low:high],
            None if self.targets is None else self.targets[low:high],
            None if self.positions is None else self.positions[low:high],
            None if self.weights is None else self.weights[low:high],
        )


def new_rows(
    dataset: Samples, options: BatchOptions, num_rows: int, *, padded: bool = False
) -> StoredRows:
    """Allocate reusable memory for `num_rows` rows; `padded`: of which some may be padding."""
    length = dataset.sequence_length
    has_targets = (  # some token may have no loss
        options.isolate or options.end_of_document_id is not None or dataset.masks_loss or padded
    )
    return StoredRows(
        np.empty((num_rows, length + 1), dataset.token_dtype),
        np.empty((num_rows, length + 1), np.bool_) if has_targets else None,
        np.empty((num_rows, length), np.min_scalar_type(length)) if options.isolate else None,
        np.empty((num_rows, length + 1), np.float32) if dataset.weighs_loss else None,
    )


class BatchReader:
    """Reader of rows of `dataset` as batches. For one thread at a time."""

    def __init__(self, dataset: Samples, options: BatchOptions) -> None:
        self.dataset = dataset
        self.options = options
        self._width = dataset.sequence_length + 1
        self._chunk_rows = max(1, CHUNK_TOKENS // dataset.sequence_length)
        self._unsigned = np.dtype(dataset.token_dtype.str.replace("i", "u"))
        length = dataset.sequence_length
        self._column_numbers = np.arange(length, dtype=np.min_scalar_type(length))
        self._collator = Collator(options.pin)

    def read(self, samples: Indices, rows: int) -> MicroBatch:
        """Return one batch of `rows` rows; rows beyond `samples` are padding, token 0 without loss.
        Raises DataError as `read_rows`."""
        stored = new_rows(self.dataset, self.options, rows, padded=len(samples) < rows)
        self.read_rows(samples, stored)
        return self._collator.collate(stored)

    def read_rows(
        self, samples: Indices, out: StoredRows, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Fill `out` with `samples`, one per row, and then with padding. Returns early once `stop`
        returns True. Raises DataError if a file is corrupt, or has a token not in the vocabulary:
        it would be an out-of-range read of the embedding."""
        step = self._chunk_rows
        for low in range(0, len(out.tokens), step):
            if stop():
                break
            self._read_chunk(samples[low : low + step], out.part(low, low + step))

    def _read_chunk(self, samples: Indices, out: StoredRows) -> None:
        """Read and check some rows; see `read_rows`."""
        # Fill the rows of samples; rows beyond them are padding without targets.
        count = len(samples)
        if out.targets is not None:
            out.targets[:count] = True
            out.targets[count:] = False
        if out.weights is not None:
            out.weights[:] = 1
        loss_mask = out.targets if self.dataset.masks_loss else None
        isolate = self.options.isolate
        rows = TokenRows(out.tokens, [] if isolate else None, loss_mask, out.weights)
        self.dataset.fill(samples, np.arange(count), rows)
        out.tokens[count:] = 0
        # A token outside of the vocabulary would read outside of the embedding.
        tokens = out.tokens.view(self._unsigned)  # which makes negative numbers very large
        vocab_size = self.dataset.vocab_size
        if tokens.size and tokens.max() >= vocab_size:
            row = int(np.flatnonzero(tokens.max(axis=1) >= vocab_size)[0])
            row_tokens = out.tokens[row]
            raise DataError(
                f"{self.dataset.describe(int(samples[row]))} are corrupt: one of them is "
                f"{row_tokens.min()} or {row_tokens.max()}, the vocabulary has {vocab_size} -> "
                f"{REBUILD}"
            )
        # Remove targets after the end of a document, and across isolated documents.
        if self.options.end_of_document_id is not None:
            assert out.targets is not None
            ends = out.tokens[:, :-1] == self.options.end_of_document_id
            out.targets[:, 1:] &= ~ends
        if out.positions is not None:
            assert out.targets is not None
            begins = np.concatenate([np.empty(0, np.int64), *(rows.begins or ())])
            # The target of the last token before a document is that document's first token.
            out.targets.reshape(-1)[begins] = False
            self._fill_positions(begins, out.positions)

    def _fill_positions(self, begins: Indices, out: npt.NDArray[np.unsignedinteger[Any]]) -> None:
        """Fill `out`, [R, T], with the distance of every token from the start of its document, the
        last of `begins` (``row * (T + 1) + t``) or row starts before it."""
        num_rows, length = out.shape
        rows, columns = np.divmod(begins, self._width)
        is_input = columns < length  # the last token of a row is only a label
        # Starts as positions ``row * T + t`` of `out`.
        starts = np.concatenate(
            [rows[is_input] * length + columns[is_input], np.arange(num_rows) * length]
        )
        starts.sort()
        start_columns = (starts % length).astype(out.dtype)
        np.subtract(
            self._column_numbers,
            np.repeat(start_columns, np.diff(starts, append=out.size)).reshape(out.shape),
            out=out,
        )


class Collator:
    """Collator of stored rows to the tensors of a step. For a single thread at a time. `pin`: in
    page-locked memory."""

    def __init__(self, pin: bool) -> None:
        self.pin = pin
        self._arrays: list[npt.NDArray[np.int64]] = []

    def collate(self, rows: StoredRows) -> MicroBatch:
        """Return `rows` as a batch that shares no memory with them."""
        count, width = rows.tokens.shape
        if rows.targets is None and rows.positions is None:
            (tokens,), (array,) = self._new((count, width), 1)
            np.copyto(array, rows.tokens)
            return MicroBatch.of_tokens(tokens)
        tensors, arrays = self._new((count, width - 1), 2 if rows.positions is None else 3)
        step = max(1, COLLATED_TOKENS // (width - 1))
        for low in range(0, count, step):
            part = rows.part(low, low + step)
            input_ids, labels, *position_ids = (array[low : low + step] for array in arrays)
            # Both directly from the stored type: reading two bytes costs less than eight.
            np.copyto(input_ids, part.tokens[:, :-1])
            np.copyto(labels, part.tokens[:, 1:])
            if part.targets is not None:
                np.copyto(labels, IGNORED_LABEL, where=~part.targets[:, 1:])
            if part.positions is not None:
                np.copyto(position_ids[0], part.positions)
        batch = MicroBatch(*tensors)
        if rows.weights is None:
            return batch
        # 0 without a target, so that the sum of the weights is the sum over the targets.
        weights = np.where(arrays[1] == IGNORED_LABEL, np.float32(0), rows.weights[:, 1:])
        weights_tensor = torch.from_numpy(weights)
        return replace(batch, weights=weights_tensor.pin_memory() if self.pin else weights_tensor)

    def _new(
        self, shape: tuple[int, int], count: int
    ) -> tuple[list[torch.Tensor], list[npt.NDArray[np.int64]]]:
        """Return `count` empty tensors, and their memory as arrays."""
        if self.pin:
            tensors = [torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(count)]
            return tensors, [tensor.numpy() for tensor in tensors]
        arrays = [self._unused(shape) for _ in range(count)]
        self._arrays = [*self._arrays, *arrays][-MAX_KEPT_ARRAYS:]
        return [torch.from_numpy(array) for array in arrays], arrays

    def _unused(self, shape: tuple[int, int]) -> npt.NDArray[np.int64]:
        """Return an array that no tensor uses any more: page faults of new memory cost more than a
        fill. A tensor references its source array until its last view is deleted."""
        arrays = self._arrays
        for number in range(len(arrays)):
            # Unused: the only references are the list's and the argument's.
            if arrays[number].shape == shape and sys.getrefcount(arrays[number]) == 2:
                return arrays.pop(number)
        return np.empty(shape, np.int64)
