"""Samples of complete documents, padded at the end: single ones, with labels, pairs. numpy only.

A document that is longer than a sample is refused, truncated at its end, or divided into pieces:
each piece begins with the last token of the previous piece, so that every token but the first of
the document is predicted exactly once.

A row of the loader holds both documents of a pair, each in `sequence_length` + 1 tokens with
padding at the end; the collator divides it into two rows
(`bigtrain.data.loading.micro_batch.MicroBatch.of_pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

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


class PaddedSamples(StreamSamples):
    """Base of samples that are ranges of documents, and padding without loss. `is_complete`: each
    position of a document in the input has a target."""

    _is_complete = False

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        assert out.loss_mask is not None
        out.tokens[rows] = 0
        out.loss_mask[rows] = False
        pieces = self._pieces(samples)
        starts, lengths = pieces.starts, pieces.lengths
        positions = rows[pieces.numbers] * (self.sequence_length + 1) + pieces.positions
        self.stream.read(starts, lengths, out.tokens.reshape(-1), positions)
        flat_mask = out.loss_mask.reshape(-1)
        if self.stream.is_masked and not self._is_complete:
            self.stream.read_mask(starts, lengths, flat_mask, positions)
            return
        # Of complete documents every position is read, so the targets are one token later.
        shift = 1 if self._is_complete else 0
        for position, length in zip(positions.tolist(), lengths.tolist(), strict=True):
            flat_mask[position + shift : position + shift + length] = True


class DocumentSamples(PaddedSamples):
    """Documents of `stream`, or pieces of documents. documents, offsets, lengths: int64 [samples]:
    the document of a sample, its first token in that document, and its number of tokens. `longer`:
    what is done with documents that are longer than a sample. `length_note`: how truncation
    changes the documents, or that rows are mostly padding; empty if neither. `is_complete`, and
    further errors: see `fitted_lengths`. Raises DataError if there are no documents."""

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
        self.document_lengths, self.length_note = lengths, ""
        # Pieces overlap by one token, so that each has up to `sequence_length` targets.
        if longer == "divide":
            num_pieces = np.maximum(lengths > 0, -(-(lengths - 1) // sequence_length))
            self.documents = np.repeat(np.arange(len(lengths)), num_pieces)
            first_pieces = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
            self.offsets = (np.arange(len(self.documents)) - first_pieces) * sequence_length
            remaining_lengths = lengths[self.documents] - self.offsets
            self.lengths = np.minimum(remaining_lengths, sequence_length + 1)
        else:
            is_truncated = longer == "truncate"
            fitted, self.length_note = fitted_lengths(
                stream, lengths, sequence_length, truncates=is_truncated, is_complete=is_complete
            )
            self.documents, self.lengths = np.arange(len(lengths)), fitted
            self.offsets = np.zeros_like(fitted)
        self._begins = begins[self.documents] + self.offsets
        super().__init__(stream, sequence_length, len(self.documents))

    def _pieces(self, samples: Indices) -> Ranges:
        begins, lengths = self._begins[samples], self.lengths[samples]
        return Ranges(np.arange(len(samples)), begins, lengths, np.zeros_like(samples))


class ClassifiedSamples(DocumentSamples):
    """Documents of `stream`, complete, padded at the end. labels: uint8 [samples]. `truncates`:
    longer documents, at the end. Raises DataError as `DocumentSamples`."""

    def __init__(
        self, stream: TokenStream, sequence_length: int, *, truncates: bool = False
    ) -> None:
        longer: Longer = "truncate" if truncates else "refuse"
        super().__init__(stream, sequence_length, longer, is_complete=True)
        parts: list[npt.NDArray[np.uint8]] = [shard.labels for shard in stream.shards]
        self.labels = np.concatenate(parts)


class PairSamples(PaddedSamples):
    """Pairs of the documents of `stream`. `sequence_length` is the length of a row with both
    documents. `truncates`: longer documents are truncated at the end; `length_note`: see
    `DocumentSamples`. `is_complete`: for a model that scores a document at its
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
        self._lengths, self.length_note = fitted_lengths(
            stream, lengths, sequence_length, truncates=truncates, is_complete=is_complete
        )
        super().__init__(stream, 2 * self._half - 1, len(lengths) // 2)

    def _pieces(self, samples: Indices) -> Ranges:
        documents = np.stack([2 * samples, 2 * samples + 1], 1).reshape(-1)
        positions = np.tile([0, self._half], len(samples))
        numbers = np.repeat(np.arange(len(samples)), 2)
        return Ranges(numbers, self._begins[documents], self._lengths[documents], positions)


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
    """Return the tokens of every document that fit a sample, and a line on what is lost, or on
    rows that are mostly padding. Raises DataError for documents that are longer and not truncated,
    or have no target after truncation. `is_complete`: the model reads the last token too, which
    otherwise is only a target. A document is then marked by as many targets as it has tokens."""
    num_labels_after = 0 if is_complete else 1  # the last label of a sample is not an input
    width = sequence_length + num_labels_after
    longer_documents = np.flatnonzero(lengths > width)
    if not len(longer_documents):
        longest = int(lengths.max(initial=0)) - num_labels_after
        return lengths, shorter_rows(longest, sequence_length)
    if not truncates:
        raise DataError(
            f"{len(longer_documents)} of {len(lengths)} documents are longer than a "
            f"sample (the longest has {int(lengths.max())} tokens, batch.sequence_length = "
            f"{sequence_length} holds {width}) -> batch.sequence_length="
            f"{int(lengths.max()) - num_labels_after}, or data.long_documents=truncate"
        )
    # Describe how much truncation drops, and refuse documents that lose all targets.
    fitted = np.minimum(lengths, width)
    share = 1 - fitted.sum() / lengths.sum()
    length_note = (
        f"{len(longer_documents)} of {len(lengths)} answers are truncated, which loses {share:.2%} "
        "of the tokens"
    )
    if not stream.is_masked:  # every token is a target
        return fitted, length_note
    begins = np.cumsum(lengths) - lengths
    unanswered = []
    for document in longer_documents.tolist():
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
    return fitted, length_note


def shorter_rows(longest: int, sequence_length: int) -> str:
    """Return a line on rows at least half of which is padding in every document; else an empty one.
    longest: tokens of the longest document that are inputs."""
    rounding = 64 if longest > 64 else 8  # the shorter length is a multiple of it
    shorter_length = max(rounding, -(-longest // rounding) * rounding)
    if shorter_length > sequence_length // 2:
        return ""
    return (
        f"the longest document has {longest} tokens, and rows are padded to batch.sequence_length "
        f"= {sequence_length}: batch.sequence_length={shorter_length} gives the same losses with "
        "less work"
    )
