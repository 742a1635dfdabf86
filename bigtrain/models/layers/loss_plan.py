"""Choice of the computation of a run's loss, and its installation in a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from bigtrain.models.layers.chunked_loss import ChunkedLoss, Fused
from bigtrain.models.layers.token_loss import IGNORED_LABEL, NO_TERMS, LossTerms


@dataclass(frozen=True)
class LossPlan:
    """Choice of the loss computation, and why, as a human-readable line. chunk_tokens: tokens whose
    logits exist at a time. softcap: of the logits, for Liger's kernel."""

    kind: Literal["plain", "chunked", "liger"]
    chunk_tokens: int
    reason: str
    softcap: float | None = None

    def install(self, model: PreTrainedModel, terms: LossTerms = NO_TERMS) -> ChunkedLoss | None:
        """Make `model` compute its loss, with `terms`, in this way; None if it still returns
        logits."""
        if self.kind == "plain":
            return None
        fused = _liger_loss(self.softcap) if self.kind == "liger" else None
        return ChunkedLoss(model, self.chunk_tokens, fused, terms)


def _liger_loss(softcap: float | None) -> Fused:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    kernel = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED_LABEL, reduction="sum", softcap=softcap
    )

    def loss(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        summed: torch.Tensor = kernel(weight, rows, labels, bias)
        return summed.float()

    return loss
