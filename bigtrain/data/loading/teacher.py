"""Probabilities of a teacher for the targets of a run, from stored scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.mixture import MixedSamples
from bigtrain.data.samples.packing_plan import PackedDocuments
from bigtrain.data.samples.token_stream import Indices
from bigtrain.data.shards.scores import Scores

TopK = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
"""Log-probabilities of the k most probable tokens, [..., k], and their ids."""


class TeacherRows:
    """Teacher probabilities for packed documents. `scores`: of the training documents of every
    source of `samples`, with an equal k; their files are mapped into memory. Raises DataError for a
    file that cannot be read."""

    def __init__(self, samples: MixedSamples, scores: Sequence[Scores]) -> None:
        self._samples = samples
        (self._k,) = {source_scores.request.top_k for source_scores in scores}  # equal for all
        self._parts = [_Parts.of(source_scores) for source_scores in scores]

    def rows(self, samples: Indices) -> TopK:
        """Return the teacher's tokens at each target of `samples`: [samples, sequence_length, k].
        Padding has the log-probability -inf."""
        shape = (len(samples), self._samples.sequence_length, self._k)
        values, ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64)
        for number, indices, source_samples in self._samples.by_source(samples):
            packed = self._samples.sources[number]
            assert isinstance(packed, PackedDocuments)
            positions = packed.stream_positions(source_samples)[:, 1:]
            row, column = np.nonzero(positions >= 0)
            top_k = self._parts[number].at(positions[row, column])
            values[indices[row], column], ids[indices[row], column] = top_k
        return values, ids


@dataclass(frozen=True)
class _Parts:
    """Arrays of consecutive parts of a split; `ends`: token after each part."""

    ends: Indices
    values: list[npt.NDArray[np.float32]]
    ids: list[npt.NDArray[np.int32]]

    @classmethod
    def of(cls, scores: Scores) -> _Parts:
        records = [record for record in scores.parts("train") if record.tokens]
        ends = np.cumsum([record.tokens for record in records])
        values, ids = (
            [scores.mapped(record, name) for record in records]
            for name in ("top_values", "top_ids")
        )
        return cls(ends, values, ids)

    def at(self, positions: Indices) -> TopK:
        """Return the teacher's tokens at `positions` of the stream, [tokens, k]."""
        part_numbers = np.searchsorted(self.ends, positions, side="right")
        shape = (len(positions), self.values[0].shape[-1])
        values, ids = np.empty(shape, np.float32), np.empty(shape, np.int64)
        for part in np.unique(part_numbers).tolist():
            indices = np.flatnonzero(part_numbers == part)
            offsets = positions[indices] - (self.ends[part - 1] if part else 0)
            values[indices], ids[indices] = self.values[part][offsets], self.ids[part][offsets]
        return values, ids
