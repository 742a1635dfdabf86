"""From rows of tokens to the tensors of a forward pass, many rows at a time.

Shapes: R = rows, B = samples of a micro-batch, T = sequence length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from bigtrain.data.samples import Indices, Samples, TokenRows
from bigtrain.errors import DataError

IGNORED_LABEL = -100
"""The label without loss, `ignore_index` of torch's cross-entropy and of transformers."""

CHUNK_TOKENS = 1 << 17
"""Tokens that are read, checked and converted in one go: what stays in a core's cache."""

MAX_KEPT_ARRAYS = 12


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one data-parallel rank, on the host.

    `input_ids` int64 [B, T]; `labels` int64 [B, T], already shifted: ``labels[b, t]`` is the token
    to predict from ``input_ids[b, : t + 1]``, or -100 where there is no loss. `position_ids` int64
    [B, T], where documents are isolated: 0 at the first token of each document and of each row;
    the label that would cross a boundary has no loss.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None

    def split(self, rows: int) -> list[MicroBatch]:
        """The same in parts of `rows` rows, which share its memory."""
        positions = self.position_ids
        if len(self.input_ids) == rows:
            return [self]
        parts = zip(
            self.input_ids.split(rows),
            self.labels.split(rows),
            repeat(None) if positions is None else positions.split(rows),
            strict=False,
        )
        return [MicroBatch(*part) for part in parts]


@dataclass(frozen=True)
class BatchOptions:
    """How labels and positions are made.

    end_of_document_id: given where the token after it gets no loss (Megatron's ``eod_mask_loss``).
    isolate: keep documents apart, as `MicroBatch` says.
    pin: page-locked tensors (CUDA only).
    """

    end_of_document_id: int | None = None
    isolate: bool = False
    pin: bool = False


class BatchReader:
    """Reads rows of `dataset` as batches. For one thread at a time: its buffer is used again."""

    def __init__(self, dataset: Samples, options: BatchOptions) -> None:
        self.dataset = dataset
        self.options = options
        self._width = dataset.sequence_length + 1
        self._chunk_rows = max(1, CHUNK_TOKENS // self._width)
        self._arrays: list[npt.NDArray[np.int64]] = []
        self._buffer = np.empty((self._chunk_rows, self._width), dataset.token_dtype)
        self._unsigned = np.dtype(dataset.token_dtype.str.replace("i", "u"))
        self._places = np.arange(self._chunk_rows * self._width, dtype=np.int64)

    def read(
        self, samples: Indices, rows: int, stop: Callable[[], bool] = lambda: False
    ) -> MicroBatch:
        """One batch of `rows` rows; those beyond `samples` are padding, token 0 without loss.

        Returns early, with anything in it, once `stop` says so. Raises DataError where a file is
        damaged, or holds a token that is not in the vocabulary: it would be an out-of-range read
        of the embedding.
        """
        shape = rows, self.dataset.sequence_length
        num_parts = 3 if self.options.isolate else 2
        if self.options.pin:
            parts = [
                torch.empty(shape, dtype=torch.int64, pin_memory=True) for _ in range(num_parts)
            ]
            arrays = [part.numpy() for part in parts]
        else:
            arrays = [self._unused(shape) for _ in range(num_parts)]
            parts = [torch.from_numpy(array) for array in arrays]
            self._arrays = [*self._arrays, *arrays][-MAX_KEPT_ARRAYS:]
        step = self._chunk_rows
        for low in range(0, rows, step):
            if stop():
                break
            self._read_chunk(
                samples[low : low + step], *(array[low : low + step] for array in arrays)
            )
        return MicroBatch(*parts)

    def _unused(self, shape: tuple[int, int]) -> npt.NDArray[np.int64]:
        """An array that no tensor uses any more: the pages of new memory cost more than filling it.

        A tensor holds a reference to the array it was made from until its last view is gone.
        """
        arrays = self._arrays
        for number in range(len(arrays)):
            # In use by nobody: the references are that of the list and that of the argument.
            if arrays[number].shape == shape and sys.getrefcount(arrays[number]) == 2:
                return arrays.pop(number)
        return np.empty(shape, np.int64)

    def _read_chunk(
        self,
        samples: Indices,
        input_ids: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
        position_ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        count, length = len(samples), self.dataset.sequence_length
        rows = self._rows(len(input_ids))
        self.dataset.fill(samples, self._places[:count], rows)
        if count < len(input_ids):
            rows.tokens[count:] = 0
        self._check_vocabulary(samples, rows)
        # Straight from the type they are stored in: reading two bytes costs less than eight.
        np.copyto(input_ids, rows.tokens[:, :-1])
        np.copyto(labels, rows.tokens[:, 1:])
        if count < len(input_ids):
            labels[count:] = IGNORED_LABEL
        flat_labels = labels.reshape(-1)
        if self.options.end_of_document_id is not None:
            ends = rows.tokens[:, :-1] == self.options.end_of_document_id
            flat_labels[np.flatnonzero(ends)] = IGNORED_LABEL
        if rows.loss_mask is not None:
            np.copyto(labels, IGNORED_LABEL, where=~rows.loss_mask[:, 1:])
        if position_ids is not None:
            assert rows.begins is not None
            begins = np.concatenate([np.empty(0, np.int64), *rows.begins])
            row, place = np.divmod(begins, self._width)
            # The label of the last token before a document is that document's first token.
            after = place > 0
            flat_labels[row[after] * length + place[after] - 1] = IGNORED_LABEL
            inside = place < length
            self._fill_positions(row[inside] * length + place[inside], position_ids)

    def _rows(self, count: int) -> TokenRows:
        return TokenRows(
            self._buffer[:count],
            [] if self.options.isolate else None,
            np.ones((count, self._width), np.bool_) if self.dataset.masks_loss else None,
        )

    def _check_vocabulary(self, samples: Indices, rows: TokenRows) -> None:
        tokens = rows.tokens.view(self._unsigned)  # where negative numbers are very large
        vocab_size = self.dataset.vocab_size
        if tokens.size and tokens.max() >= vocab_size:
            row = int(np.flatnonzero(tokens.max(axis=1) >= vocab_size)[0])
            found = rows.tokens[row]
            raise DataError(
                f"{self.dataset.describe(int(samples[row]))} are damaged: one of them is "
                f"{found.min()} or {found.max()}, the vocabulary has {vocab_size} -> tokenize again"
            )

    def _fill_positions(self, begins: Indices, out: npt.NDArray[np.int64]) -> None:
        """Distances from the last of `begins` (places in `out`, flat) or of row beginnings."""
        first = np.sort(np.concatenate([begins, self._places[: out.size : out.shape[1]]]))
        lengths = np.diff(first, append=out.size)
        np.subtract(self._places[: out.size], np.repeat(first, lengths), out=out.reshape(-1))
