"""Loss of answers that are desirable or not (KTO, arXiv 2402.01306)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.metrics.recording import record
from bigtrain.objectives.kto import Kto
from bigtrain.objectives.losses.passes import (
    Factor,
    ObjectiveLoss,
    Passes,
    Summed,
    reference_sums,
)


class KtoLoss(ObjectiveLoss):
    """Loss of rated answers.

    How far the model has moved from its reference is one number for a step: the mean over the
    mismatched answers of the global batch, 0 at least, without a gradient. In an evaluation it is
    the mean over all held-out samples, whose micro-batches this therefore keeps on the host."""

    def __init__(self, objective: Kto) -> None:
        super().__init__(objective)
        self._divergence: torch.Tensor | None = None

    def count(self, labels: torch.Tensor) -> int:
        return int((labels[0::2] != IGNORED_LABEL).any(-1).sum())

    def trained(self, batch: MicroBatch) -> MicroBatch:
        """Return the rated answers: every other row, of which the next one is mismatched."""
        return batch.every_second(0)

    @torch.no_grad()
    def prepare(self, passes: Passes, batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Estimate the divergence. TRL does it for the micro-batches that ranks train at once."""
        all_batches = list(batches)
        sum_and_count = torch.zeros(2, dtype=torch.float64)  # of log ratios of mismatched answers
        mismatched = (batch.every_second(1) for batch in all_batches)
        for batch, moved, policy in passes.row_sums(mismatched):
            reference = reference_sums(passes, batch, moved)
            sum_and_count = sum_and_count.to(policy.device)
            sum_and_count[0] += (policy - reference).sum()
            sum_and_count[1] += (moved.labels != IGNORED_LABEL).any(-1).sum()
        sum_and_count = passes.sum_over_replicas(sum_and_count)
        self._divergence = (sum_and_count[0] / sum_and_count[1].clamp(min=1)).clamp(min=0).float()
        record("kl", self._divergence)
        return all_batches

    def summed_loss(
        self, passes: Passes, batch: MicroBatch, moved: MicroBatch, factor: Factor = None
    ) -> Summed:
        assert self._divergence is not None
        section = self.objective.section
        answers, moved_answers = self.trained(batch), self.trained(moved)
        reference = reference_sums(passes, answers, moved_answers)
        values, outputs = passes.log_probabilities(answers, moved_answers)
        sums, desirable = values.sum(-1), moved_answers.desirable
        assert desirable is not None
        assert answers.desirable is not None
        # Equations 7 and 8: lambda_D (1 - sigma(beta (r - z_0))) of a desirable answer, lambda_U (1
        # - sigma(beta (z_0 - r))) of another one, with the log ratio r to the reference and the
        # divergence z_0.
        weights = torch.where(desirable, section.desirable_weight, section.undesirable_weight)
        margins = (sums - reference - self._divergence) * torch.where(desirable, 1.0, -1.0)
        present = (moved_answers.labels != IGNORED_LABEL).any(-1)
        losses = weights * (1 - torch.sigmoid(section.beta * margins)) * present

        # Metrics under TRL's names; answers are counted on the host.
        rewards = section.beta * (sums.detach() - reference)
        present_on_host = (answers.labels != IGNORED_LABEL).any(-1)
        for side, is_side in (("chosen", answers.desirable), ("rejected", ~answers.desirable)):
            mask = is_side & present_on_host
            if count := int(mask.sum()):
                mask = mask.to(sums.device)
                for name, row_values in (("rewards", rewards), ("logps", sums.detach())):
                    record(f"{name}/{side}", (row_values * mask).sum() / count, weight=float(count))
        return losses.sum(), outputs
