"""Samples of preference data: a pair of documents, chosen then rejected. numpy only.

A row of the loader holds both documents, each in `sequence_length` + 1 tokens with padding at the
end; the collator divides it into two rows
(`bigtrain.data.loading.micro_batch.MicroBatch.of_pairs`).
"""

from __future__ import annotations

import numpy as np

from bigtrain.data.samples.documents import document_lengths, fill_documents, fitted_lengths
from bigtrain.data.samples.token_stream import (
    Indices,
    Ranges,
    StreamSamples,
    TokenRows,
    TokenStream,
)
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import Split
from bigtrain.errors import DataError
from bigtrain.objectives.section import documents_per_row


class PairSamples(StreamSamples):
    """Pairs of the documents of `stream`. `sequence_length` is the length of a row with both
    documents. `truncates`: longer documents are truncated at the end; `truncation_note`: how that
    changes them, empty if it does not. `is_complete`: for a model that scores a document at its
    last token, see `fitted_lengths`. Raises DataError if the number of documents is 0 or odd, and
    as `fitted_lengths`."""

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        *,
        truncates: bool = False,
        is_complete: bool = False,
    ) -> None:
        lengths = document_lengths(stream.shards)
        if len(lengths) % 2 or not len(lengths):
            raise DataError(
                f"{len(lengths)} documents are not pairs of a chosen and a rejected answer -> "
                "tokenize preference data"
            )
        self._half = sequence_length + 1
        self._begins = np.cumsum(lengths) - lengths
        self._is_complete = is_complete
        self._lengths, self.truncation_note = fitted_lengths(
            stream, lengths, sequence_length, truncates=truncates, is_complete=is_complete
        )
        super().__init__(stream, 2 * self._half - 1, len(lengths) // 2, masks_loss=True)

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        assert out.loss_mask is not None
        out.tokens[rows] = 0
        out.loss_mask[rows] = False
        documents, positions = self._positions(samples, rows)
        starts, lengths = self._begins[documents], self._lengths[documents]
        fill_documents(self.stream, starts, lengths, positions, out, is_complete=self._is_complete)

    def _positions(self, samples: Indices, rows: Indices) -> tuple[Indices, Indices]:
        """Return the documents of `samples`, and their positions in the buffer."""
        documents = np.stack([2 * samples, 2 * samples + 1], 1).reshape(-1)
        begins = rows * (2 * self._half)
        return documents, np.stack([begins, begins + self._half], 1).reshape(-1)

    def _pieces(self, samples: Indices) -> Ranges:
        documents, positions = self._positions(samples, np.zeros_like(samples))
        numbers = np.repeat(np.arange(len(samples)), 2)
        return Ranges(numbers, self._begins[documents], self._lengths[documents], positions)


def count_answers(dataset: TokenDataset, split: Split) -> int:
    """Return the samples of a split: its pairs, or its rated answers."""
    return dataset.table.num_documents(split) // documents_per_row(dataset.table.rows)
