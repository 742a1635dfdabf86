"""Loss of a model that scores the chosen answer of a pair higher."""

from __future__ import annotations

import torch.nn.functional as F

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.objectives.losses.passes import (
    Factor,
    ObjectiveLoss,
    Passes,
    Summed,
    pairs_present,
    record_rewards,
)


class RewardLoss(ObjectiveLoss):
    """Loss of a model that scores answers: that the chosen one of a pair has the higher score
    (Bradley and Terry; as in TRL's RewardTrainer)."""

    def summed_loss(
        self, passes: Passes, batch: MicroBatch, moved: MicroBatch, factor: Factor = None
    ) -> Summed:
        scores, outputs = passes.scores(batch, moved)
        chosen_scores, rejected_scores = scores[0::2, 0], scores[1::2, 0]
        # -log sigma(r_chosen - r_rejected) (Bradley and Terry 1952) leaves the center of scores
        # open: c (r_chosen + r_rejected)^2 sets it (Eisenstein et al. 2023, arXiv 2312.09244).
        losses = -F.logsigmoid(chosen_scores - rejected_scores)
        center = self.objective.section.center_rewards_coefficient
        losses = losses + center * (chosen_scores + rejected_scores) ** 2
        present = pairs_present(moved.labels)
        num_pairs = self.count(batch.labels)
        record_rewards(chosen_scores.detach(), rejected_scores.detach(), present, num_pairs)
        return (losses * present.float()).sum(), outputs
