"""Cross-entropy of the label of a sample."""

from __future__ import annotations

import torch.nn.functional as F

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.objectives.losses.passes import (
    Factor,
    ObjectiveLoss,
    Passes,
    Summed,
    record_mean,
)


class ClassificationLoss(ObjectiveLoss):
    """Cross-entropy of the label of a sample."""

    def summed_loss(
        self, passes: Passes, batch: MicroBatch, moved: MicroBatch, factor: Factor = None
    ) -> Summed:
        scores, outputs = passes.scores(batch, moved)
        assert moved.classes is not None
        weights = (moved.labels != IGNORED_LABEL).any(-1).float()
        losses = F.cross_entropy(scores, moved.classes, reduction="none")
        correct = (scores.detach().argmax(-1) == moved.classes).float()
        record_mean("accuracy", correct, weights, self.count(batch.labels))
        return (losses * weights).sum(), outputs
