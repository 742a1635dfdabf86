"""Samples that are single documents, padded at the end. numpy only.

A document that is longer than a sample is refused, truncated at its end, or divided into pieces:
each piece begins with the last token of the previous piece, so that every token but the first of
the document is predicted exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from bigtrain.data.samples.token_stream import (
    Indices,
    Ranges,
    StreamSamples,
    TokenRows,
    TokenStream,
)
from bigtrain.data.shards.format import TokenShard
from bigtrain.errors import DataError

Longer = Literal["refuse", "truncate", "divide"]


class DocumentSamples(StreamSamples):
    """Documents of `stream`, or pieces of documents. documents, offsets, lengths: int64 [samples]:
    the document of a sample, its first token in that document, and its number of tokens. `longer`:
    what is done with documents that are longer than a sample. `truncation_note`: how truncation
    changes the documents, empty if it does not. `is_complete`, and further errors: see
    `fitted_lengths`. Raises DataError if there are no documents."""

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        longer: Longer,
        *,
        is_complete: bool = False,
    ) -> None:
        self._is_complete = is_complete
        lengths = document_lengths(stream.shards, may_be_empty=longer == "divide")
        if not lengths.any():
            raise DataError("it has no documents -> tokenize some")
        begins = np.cumsum(lengths) - lengths
        self.longest = int(lengths.max())
        self.document_lengths, self.truncation_note = lengths, ""
        # Pieces overlap by one token, so that each has up to `sequence_length` targets.
        if longer == "divide":
            counts = np.maximum(lengths > 0, -(-(lengths - 1) // sequence_length))
            self.documents = np.repeat(np.arange(len(lengths)), counts)
            firsts = np.repeat(np.cumsum(counts) - counts, counts)
            self.offsets = (np.arange(len(self.documents)) - firsts) * sequence_length
            remaining_lengths = lengths[self.documents] - self.offsets
            self.lengths = np.minimum(remaining_lengths, sequence_length + 1)
        else:
            is_truncated = longer == "truncate"
            fitted, self.truncation_note = fitted_lengths(
                stream, lengths, sequence_length, truncates=is_truncated, is_complete=is_complete
            )
            self.documents, self.lengths = np.arange(len(lengths)), fitted
            self.offsets = np.zeros_like(fitted)
        self._begins = begins[self.documents] + self.offsets
        super().__init__(stream, sequence_length, len(self.documents), masks_loss=True)

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        assert out.loss_mask is not None
        out.tokens[rows] = 0
        out.loss_mask[rows] = False
        positions = rows * (self.sequence_length + 1)
        starts, lengths = self._begins[samples], self.lengths[samples]
        fill_documents(self.stream, starts, lengths, positions, out, is_complete=self._is_complete)

    def _pieces(self, samples: Indices) -> Ranges:
        begins, lengths = self._begins[samples], self.lengths[samples]
        return Ranges(np.arange(len(samples)), begins, lengths, np.zeros_like(samples))


def document_lengths(shards: Sequence[TokenShard], *, may_be_empty: bool = False) -> Indices:
    """Return the tokens of every document, int64. `may_be_empty`: documents may have no token, or
    several sequences; otherwise raises DataError for those."""
    parts = [np.empty(0, np.int64)]
    for shard in shards:
        if shard.num_documents != shard.num_sequences and not may_be_empty:
            raise shard.corrupt("it has documents without tokens, or of several sequences")
        ends = np.concatenate([[0], np.cumsum(shard.sequence_lengths, dtype=np.int64)])
        parts.append(np.diff(ends[shard.document_starts]))
    return np.concatenate(parts)


def fitted_lengths(
    stream: TokenStream,
    lengths: Indices,
    sequence_length: int,
    *,
    truncates: bool,
    is_complete: bool = False,
) -> tuple[Indices, str]:
    """Return the tokens of every document that fit a sample, and a line on what is lost. Raises
    DataError for documents that are longer and not truncated, or have no target after truncation.
    `is_complete`: the model reads the last token too, which otherwise is only a target. A document
    is then marked by as many targets as it has tokens."""
    num_labels_after = 0 if is_complete else 1  # the last label of a sample is not an input
    width = sequence_length + num_labels_after
    longer = np.flatnonzero(lengths > width)
    if not len(longer):
        return lengths, ""
    if not truncates:
        raise DataError(
            f"{len(longer)} of {len(lengths)} documents are longer than a "
            f"sample (the longest has {int(lengths.max())} tokens, batch.sequence_length = "
            f"{sequence_length} holds {width}) -> batch.sequence_length="
            f"{int(lengths.max()) - num_labels_after}, or data.long_documents=truncate"
        )
    # Describe how much truncation drops, and refuse documents that lose all targets.
    share = 1 - np.minimum(lengths, width).sum() / lengths.sum()
    truncation_note = (
        f"{len(longer)} of {len(lengths)} answers are truncated, which loses {share:.2%} "
        "of the tokens"
    )
    begins = np.cumsum(lengths) - lengths
    unanswered = []
    for document in longer.tolist() if stream.is_masked else ():
        mask = np.empty(width, np.bool_)
        document_index = np.array([document])
        stream.read_mask(begins[document_index], np.array([width]), mask, np.zeros(1, np.int64))
        if not mask.any():
            unanswered.append(document)
    if unanswered:
        listed = ", ".join(map(str, unanswered[:5])) + (", ..." if len(unanswered) > 5 else "")
        raise DataError(
            f"{len(unanswered)} of {len(lengths)} documents ({listed}) have no answer in their "
            f"first {width} tokens, to which they are truncated -> a larger "
            f"batch.sequence_length, or tokenize with --max-prompt-tokens {width - 1}, which drops "
            "and counts them"
        )
    return np.minimum(lengths, width), truncation_note


def fill_documents(
    stream: TokenStream,
    starts: Indices,
    lengths: Indices,
    positions: Indices,
    out: TokenRows,
    *,
    is_complete: bool = False,
) -> None:
    """Write documents, ranges of `stream`, with their targets to positions `positions` of the flat
    `out`. `is_complete`: each position of a document in the input has a target."""
    assert out.loss_mask is not None
    stream.read(starts, lengths, out.tokens.reshape(-1), positions)
    flat = out.loss_mask.reshape(-1)
    if stream.is_masked and not is_complete:
        stream.read_mask(starts, lengths, flat, positions)
        return
    shift = 1 if is_complete else 0  # the target of a position is after it
    for position, length in zip(positions.tolist(), lengths.tolist(), strict=True):
        flat[position + shift : position + shift + length] = True
