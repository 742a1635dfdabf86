"""What one forward pass of a rank is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch

IGNORED_LABEL = -100
"""The label without loss, `ignore_index` of torch's cross-entropy and of transformers."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one data-parallel rank, on the host.

    `input_ids` int64 [B, T]; `labels` int64 [B, T], already shifted: ``labels[b, t]`` is the token
    to predict from ``input_ids[b, : t + 1]``, or -100 where there is no loss. `position_ids` int64
    [B, T], where documents are isolated: 0 at the first token of each document and of each row;
    the label that would cross a boundary has no loss. `tokens` int64 [B, T + 1], where every token
    is to be predicted: inputs and labels are views of it, and not contiguous.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor) -> MicroBatch:
        """Every token of `tokens`, int64 [B, T + 1], predicts the next one."""
        return cls(tokens[:, :-1], tokens[:, 1:], tokens=tokens)

    def split(self, rows: int) -> list[MicroBatch]:
        """The same in parts of `rows` rows, which share its memory."""
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
        """What `move` makes of each tensor; of `tokens` alone where the others are views of it."""
        if self.tokens is not None:
            return MicroBatch.of_tokens(move(self.tokens))
        positions = self.position_ids
        return MicroBatch(
            move(self.input_ids),
            move(self.labels),
            None if positions is None else move(positions),
        )
