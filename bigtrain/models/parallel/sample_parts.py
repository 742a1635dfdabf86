"""Interface by which an engine computes parts of samples (`bigtrain.models.parallel.sequence`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class SampleParts(Protocol):
    """Ranks that share samples, each of which computes a part of every sample."""

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of `tokens` [B, T, ...]: [B, t, ...]."""

    def inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        on_host: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for this rank's part of samples `input_ids` [B, T]."""

    def whole_samples(self) -> AbstractContextManager[None]:
        """Inside, every rank computes full samples on its own."""

    def close(self) -> None:
        """Restore the model."""
