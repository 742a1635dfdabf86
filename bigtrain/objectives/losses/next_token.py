"""Cross-entropy of the next token, which the engine computes; also with a teacher.

Equations: `bigtrain.models.layers.token_loss`.
"""

from __future__ import annotations

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.models.layers.token_loss import LossTerms
from bigtrain.objectives.losses.passes import Factor, ObjectiveLoss, Passes, Summed
from bigtrain.objectives.section import ObjectiveSection


def loss_terms(section: ObjectiveSection) -> LossTerms:
    """Return the terms that a run adds to the cross-entropy of the next token."""
    # The label smoothing of preferences is a share of the pairs, and not of a target.
    smoothing = section.label_smoothing if section.kind.is_next_token else 0.0
    return LossTerms(smoothing, section.z_loss, section.kind.teacher_weight, section.temperature)


class NextTokenLoss(ObjectiveLoss):
    """Cross-entropy of the next token."""

    def summed_loss(
        self, passes: Passes, batch: MicroBatch, moved: MicroBatch, factor: Factor = None
    ) -> Summed:
        return passes.cross_entropy(batch, moved, factor)
