"""Cross-entropy of tokens, and terms that are added to it in training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100


@dataclass(frozen=True)
class LossTerms:
    """Terms of the training loss in addition to the cross-entropy. label_smoothing: share of the
    target that is divided equally over the vocabulary (Szegedy et al. 2016, arXiv 1512.00567; as
    transformers' LabelSmoother). z_loss: weight of the squared logarithm of the softmax's
    denominator (PaLM, arXiv 2204.02311)."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


NO_TERMS = LossTerms()


def summed_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, terms: LossTerms = NO_TERMS
) -> torch.Tensor:
    """Return the loss in nats summed over targets: logits float32 [N, V], labels int64 [N], -100
    for none. Without a graph (in an evaluation) it is the cross-entropy only."""
    if terms == NO_TERMS or not torch.is_grad_enabled():
        return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    loss = F.cross_entropy(
        logits,
        labels,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=terms.label_smoothing,
    )
    if terms.z_loss:
        squares = logits.logsumexp(-1).square()
        loss = loss + terms.z_loss * (squares * (labels != IGNORED_LABEL)).sum()
    return loss
