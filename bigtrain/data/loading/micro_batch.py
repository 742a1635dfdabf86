"""Input of one forward pass of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass of a data-parallel rank, on the host.

    `input_ids` int64 [B, T]; `labels` int64 [B, T], already shifted: ``labels[b, t]`` is the token
    to predict from ``input_ids[b, : t + 1]``, or -100 without loss. `position_ids` int64
    [B, T], if documents are isolated: 0 at the first token of each document and of each row;
    the label that would cross a boundary has no loss. `tokens` int64 [B, T + 1], if every token
    is a target: inputs and labels are views of it, and not contiguous. `reference` float32 [B], for
    objectives with stored scores: log-probability of the targets of a row under the reference.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor) -> MicroBatch:
        """Build a micro-batch in which every token, int64 [B, T + 1], predicts the next one."""
        return cls(tokens[:, :-1], tokens[:, 1:], tokens=tokens)

    def of_pairs(self) -> MicroBatch:
        """Divide each row, of two padded documents, into two: input_ids and labels [2 B, T], chosen
        and rejected alternate. Of 2 T + 1 inputs the one in the middle, whose target would be in
        the other document, is dropped."""
        count, width = self.input_ids.shape
        length = width // 2
        parts = [
            torch.stack([whole[:, :length], whole[:, length + 1 :]], 1).view(2 * count, length)
            for whole in (self.input_ids, self.labels)
        ]
        return MicroBatch(*parts)

    def split(self, rows: int) -> list[MicroBatch]:
        """Split it into parts of `rows` rows, which share its memory."""
        if len(self.input_ids) == rows:
            return [self]
        if self.tokens is not None:
            return [MicroBatch.of_tokens(part) for part in self.tokens.split(rows)]
        positions = self.position_ids
        parts = zip(
            self.input_ids.split(rows),
            self.labels.split(rows),
            repeat(None) if positions is None else positions.split(rows),
            strict=False,
        )
        return [MicroBatch(*part) for part in parts]

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """Apply `move` to each tensor; to `tokens` only, if the others are views of it."""
        if self.tokens is not None:
            return MicroBatch.of_tokens(move(self.tokens))
        positions, reference = self.position_ids, self.reference
        return MicroBatch(
            move(self.input_ids),
            move(self.labels),
            None if positions is None else move(positions),
            reference=None if reference is None else move(reference),
        )
