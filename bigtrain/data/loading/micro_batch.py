"""Input of a forward pass of a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Input of a forward pass of a data-parallel rank, on the host.

    `input_ids` int64 [B, T]; `labels` int64 [B, T], already shifted: ``labels[b, t]`` is the token
    to predict from ``input_ids[b, : t + 1]``, or -100 without loss. `position_ids` int64
    [B, T], if documents are isolated: 0 at the first token of every document and of every row;
    the label that would cross a boundary has no loss. `tokens` int64 [B, T + 1], if every token
    is a target: inputs and labels are views of `tokens`, and not contiguous. `reference` float32
    [B], with stored scores: log-probability of the targets of a row under the reference.
    `desirable` bool [B], of rated answers: whether the answer of a row's sample is desirable.
    `classes` int64 [B], of samples with a label: number of the label. `teacher_values` float32
    [B, T, k], `teacher_ids` int64 [B, T, k]: log-probabilities of a teacher's k most probable
    tokens at every label, and their ids. `weights` float32 [B, T]: factors of the losses of the
    targets, 0 without a target; None if all are 1.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    desirable: torch.Tensor | None = None
    classes: torch.Tensor | None = None
    teacher_values: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor) -> MicroBatch:
        """Build a micro-batch in which every token, int64 [B, T + 1], predicts the next one."""
        return cls(tokens[:, :-1], tokens[:, 1:], tokens=tokens)

    def of_pairs(self) -> MicroBatch:
        """Divide each row, of two padded documents, into two: input_ids and labels [2 B, T], chosen
        and rejected alternate. Of 2 T + 1 inputs the middle input, whose target would be in the
        second document, is dropped."""
        count, width = self.input_ids.shape
        length = width // 2

        def divide(rows: torch.Tensor) -> torch.Tensor:
            halves = torch.stack([rows[:, :length], rows[:, length + 1 :]], 1)
            return halves.view(2 * count, length)

        return MicroBatch(divide(self.input_ids), divide(self.labels))

    def split(self, rows: int) -> list[MicroBatch]:
        """Split it into parts of `rows` rows, which share its memory."""
        if len(self.input_ids) == rows:
            return [self]
        if self.tokens is not None:
            return [MicroBatch.of_tokens(part) for part in self.tokens.split(rows)]
        parts = zip(  # not strict: `repeat` has no end
            self.input_ids.split(rows),
            self.labels.split(rows),
            *(repeat(None) if tensor is None else tensor.split(rows) for tensor in self._optional),
            strict=False,
        )
        return [MicroBatch(*part) for part in parts]

    def every_second(self, first: int) -> MicroBatch:
        """Return rows `first`, `first` + 2, ..."""
        return self.moved(lambda tensor: tensor[first::2].contiguous())

    @property
    def _optional(self) -> tuple[torch.Tensor | None, ...]:
        """Fields after `labels`, in their order, of a micro-batch without `tokens`."""
        rows = self.reference, self.desirable, self.classes
        teacher = self.teacher_values, self.teacher_ids
        return self.position_ids, None, *rows, *teacher, self.weights

    @property
    def teacher(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Teacher log-probabilities and token ids; None without a teacher."""
        if self.teacher_values is None or self.teacher_ids is None:
            return None
        return self.teacher_values, self.teacher_ids

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        """Apply `move` to each tensor; only to `tokens`, if inputs and labels are its views."""
        if self.tokens is not None:
            return MicroBatch.of_tokens(move(self.tokens))
        optional_tensors = (None if tensor is None else move(tensor) for tensor in self._optional)
        return MicroBatch(move(self.input_ids), move(self.labels), *optional_tensors)
