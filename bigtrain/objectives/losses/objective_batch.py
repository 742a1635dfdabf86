"""Micro-batch as an objective of log-probabilities sees it. Imports no torch.

Shapes: R = rows of a micro-batch (of pairs: chosen and rejected alternate), T = tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ObjectiveBatch:
    """Micro-batch as an objective of log-probabilities sees it.

    log_probabilities: of every target token given the tokens before it, float32 [R, T], with a
    graph; 0 where there is no target. targets: bool [R, T]. labels: the target tokens, int64 [R,
    T]. reference: log_probabilities of the reference model, without a graph; None if the objective
    has not asked for them (``reference = True``). reference_sums: `row_sums` of the reference
    model. num_units: units of the loss (target tokens, rows or pairs) that are not padding, counted
    on the host; the weight of a mean over them (``bigtrain.record(..., weight=num_units)``).
    """

    log_probabilities: torch.Tensor
    targets: torch.Tensor
    labels: torch.Tensor
    reference: torch.Tensor | None = None
    reference_sums: torch.Tensor | None = None
    num_units: int = 0

    @cached_property
    def row_lengths(self) -> torch.Tensor:
        """Target tokens per row, int64 [R]."""
        return self.targets.sum(-1)

    @cached_property
    def row_sums(self) -> torch.Tensor:
        """Log-probability of the targets per row, float32 [R]."""
        return self.log_probabilities.sum(-1)

    @cached_property
    def row_means(self) -> torch.Tensor:
        """Log-probability per row and target token, float32 [R]; 0 without a target."""
        return self.row_sums / self.row_lengths.clamp(min=1)
