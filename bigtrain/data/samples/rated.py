"""Samples of rated answers (KTO): the answer to its prompt, and a mismatched one. numpy only.

KTO (arXiv 2402.01306) estimates how far the model has moved from its reference by answers to other
prompts. As in TRL, the mismatched row of a document is its prompt with the answer of the previous
document (for the first document, of the last document). Both rows of a sample are fixed by the
dataset, so that they do not depend on micro-batches, ranks and the order of samples. A row
of the loader holds both rows, like a pair (`bigtrain.data.samples.documents`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.documents import PaddedSamples, document_lengths, fitted_lengths
from bigtrain.data.samples.token_stream import Indices, Ranges, TokenStream
from bigtrain.errors import TooFewAnswersError


class RatedSamples(PaddedSamples):
    """Rated answers of `stream`, with mismatched answers. `sequence_length` is the length of a row
    with both. labels: uint8 [samples], 1 if the answer is desirable. `truncates`: longer documents
    are truncated at the end; `length_note`: how that changes them, empty if it does not.
    Mismatched rows are truncated. Raises TooFewAnswersError if there are fewer than two
    answers, and as `fitted_lengths`."""

    def __init__(
        self, stream: TokenStream, sequence_length: int, *, truncates: bool = False
    ) -> None:
        lengths = document_lengths(stream.shards)
        if len(lengths) < 2:
            raise TooFewAnswersError(
                f"{len(lengths)} answers have no other prompt to compare with -> tokenize more rows"
            )
        self._half = sequence_length + 1
        self._begins = np.cumsum(lengths) - lengths
        self._lengths, self.length_note = fitted_lengths(
            stream, lengths, sequence_length, truncates=truncates
        )
        parts: list[npt.NDArray[np.uint8]] = [shard.labels for shard in stream.shards]
        self.labels = np.concatenate(parts)
        super().__init__(stream, 2 * self._half - 1, len(lengths))

    def mismatched_lengths(self, samples: Indices) -> Indices:
        """Return the tokens of the mismatched row of every sample."""
        total: Indices = self._pieces(samples).lengths.reshape(-1, 3)[:, 1:].sum(1)
        return total

    def _pieces(self, samples: Indices) -> Ranges:
        """Return three ranges for each sample: its document, its prompt, and the answer of the
        previous document."""
        previous = (samples - 1) % self.num_samples
        prompt_lengths, previous_prompt_lengths = map(self._prompt_lengths, (samples, previous))
        begins = self._begins[samples]
        answer_begins = self._begins[previous] + previous_prompt_lengths
        # The mismatched row, in the second half, ends with as much of the answer as it can hold.
        answer_lengths = np.minimum(
            self._lengths[previous] - previous_prompt_lengths, self._half - prompt_lengths
        )
        second_half = np.full_like(samples, self._half)
        starts = [begins, begins, answer_begins]
        lengths = [self._lengths[samples], prompt_lengths, answer_lengths]
        positions = [np.zeros_like(samples), second_half, second_half + prompt_lengths]
        columns = (np.stack(column, 1).reshape(-1) for column in (starts, lengths, positions))
        return Ranges(np.repeat(np.arange(len(samples)), 3), *columns)

    def _prompt_lengths(self, documents: Indices) -> Indices:
        """Return the tokens before the first target of every document."""
        lengths = self._lengths[documents]
        mask = np.zeros((len(documents), self._half), np.bool_)
        offsets = np.arange(len(documents)) * self._half
        self.stream.read_mask(self._begins[documents], lengths, mask.reshape(-1), offsets)
        prompts: Indices = mask.argmax(1)
        return prompts
