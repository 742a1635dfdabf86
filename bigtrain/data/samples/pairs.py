"""Samples of preference data: a pair of documents, chosen then rejected. numpy only.

A row of the loader holds both, each in `sequence_length` + 1 tokens with padding at the end; the
collator divides it into two rows (`bigtrain.data.loading.micro_batch.MicroBatch.of_pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bigtrain.data.samples.token_stream import (
    Indices,
    Ranges,
    StreamSamples,
    TokenRows,
    TokenStream,
)
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.format import Shard
from bigtrain.data.shards.manifest import Split
from bigtrain.errors import DataError


class PairSamples(StreamSamples):
    """Pairs of the documents of `stream`. Its `sequence_length` is that of a row with both.
    `truncates`: longer documents, at the end; `lost`: how that changes them, empty if it does not.
    Raises DataError if there are none, an odd number of documents, one that is longer than a sample
    and is not truncated, or one that has no target then."""

    def __init__(
        self, stream: TokenStream, sequence_length: int, *, truncates: bool = False
    ) -> None:
        lengths = _document_lengths(stream.shards)
        if len(lengths) % 2 or not len(lengths):
            raise DataError(
                f"{len(lengths)} documents are not pairs of a chosen and a rejected answer -> "
                "tokenize preference data"
            )
        self._half = sequence_length + 1
        self._begins = np.cumsum(lengths) - lengths
        longer = np.flatnonzero(lengths > self._half)
        self.lost = ""
        if len(longer) and not truncates:
            raise DataError(
                f"{len(longer)} of {len(lengths)} answers with their prompts are longer than a "
                f"sample (the longest has {int(lengths.max())} tokens, batch.sequence_length = "
                f"{sequence_length} holds {self._half}) -> batch.sequence_length="
                f"{int(lengths.max()) - 1}, or data.long_documents=truncate"
            )
        if len(longer):
            share = 1 - np.minimum(lengths, self._half).sum() / lengths.sum()
            self.lost = (
                f"{len(longer)} of {len(lengths)} answers are truncated, which loses {share:.2%} "
                "of the tokens"
            )
            lengths = np.minimum(lengths, self._half)
        super().__init__(stream, 2 * self._half - 1, len(lengths) // 2, masks_loss=True)
        self._lengths = lengths
        for document in longer.tolist() if stream.is_masked else ():
            mask = np.empty(self._half, np.bool_)
            one = np.array([document])
            stream.read_mask(self._begins[one], lengths[one], mask, np.zeros(1, np.int64))
            if not mask.any():
                raise DataError(
                    f"document {document} has no answer in its first {self._half} tokens, to which "
                    "it is truncated -> a larger batch.sequence_length, or remove its pair"
                )

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        assert out.loss_mask is not None
        out.tokens[rows] = 0
        out.loss_mask[rows] = False
        documents, places = self._places(samples, rows)
        starts, lengths = self._begins[documents], self._lengths[documents]
        self.stream.read(starts, lengths, out.tokens.reshape(-1), places)
        if self.stream.is_masked:
            self.stream.read_mask(starts, lengths, out.loss_mask.reshape(-1), places)
        else:
            for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
                out.loss_mask.reshape(-1)[place : place + length] = True

    def _places(self, samples: Indices, rows: Indices) -> tuple[Indices, Indices]:
        """Return the documents of `samples`, and their positions in the buffer."""
        documents = np.stack([2 * samples, 2 * samples + 1], 1).reshape(-1)
        begins = rows * (2 * self._half)
        return documents, np.stack([begins, begins + self._half], 1).reshape(-1)

    def _pieces(self, samples: Indices) -> Ranges:
        documents, places = self._places(samples, np.zeros_like(samples))
        numbers = np.repeat(np.arange(len(samples)), 2)
        return Ranges(numbers, self._begins[documents], self._lengths[documents], places)


def count_pairs(dataset: TokenDataset, split: Split) -> int:
    """Return the pairs of a split."""
    return dataset.table.num_documents(split) // 2


def _document_lengths(shards: Sequence[Shard]) -> Indices:
    """Return the tokens of each document, int64. Raises DataError if a document is not one
    sequence."""
    parts = [np.empty(0, np.int64)]
    for shard in shards:
        if shard.num_documents != shard.num_sequences:
            raise shard.corrupt("it has documents without tokens, or of several sequences")
        parts.append(shard.sequence_lengths.astype(np.int64))
    return np.concatenate(parts)
