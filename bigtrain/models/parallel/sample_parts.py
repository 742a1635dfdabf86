"""Interface by which an engine computes parts of samples (`bigtrain.models.parallel.sequence`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class SampleParts(Protocol):
    """Ranks that share samples, each of which computes a part of every sample."""

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of `tokens` [B, T, ...]: [B, t, ...]."""

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of every token, [B, T, ...]; `values`: this rank's, [B, t, ...].
        Collective. Every rank must compute an equal loss from the result, once: a gradient returns
        to the rank of the values, and is not added up."""

    def padded(self, length: int) -> int:
        """Return the smallest number of tokens from `length` on that the ranks can divide."""

    @property
    def counts(self) -> bool:
        """Whether this rank counts for all ranks what they computed of a sample."""

    def inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        on_host: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the model's inputs for this rank's part of samples `input_ids` [B, T]."""

    def whole_samples(self) -> AbstractContextManager[None]:
        """Inside, every rank computes full samples independently."""

    def close(self) -> None:
        """Restore the model."""
