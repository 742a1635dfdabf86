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
        """Return the values of all tokens, [B, T, ...], of those of this rank's, [B, t, ...].
        Collective. Every rank is to compute the same loss of them, once: a gradient goes back to
        the rank whose values they are, and is not added up."""

    def padded(self, length: int) -> int:
        """Return the smallest number of tokens from `length` on that the ranks can divide."""

    @property
    def counts(self) -> bool:
        """Whether this rank is the one that counts what all of them computed of a sample."""

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
