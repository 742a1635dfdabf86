"""Losses of pairs of answers: DPO, IPO, SimPO and ORPO."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from bigtrain.metrics.recording import record
from bigtrain.objectives.losses.objective_batch import ObjectiveBatch
from bigtrain.objectives.losses.passes import LogProbabilityLoss, pairs_present, record_rewards


class PreferenceLoss(LogProbabilityLoss):
    """Losses of pairs of answers, with metrics under TRL's names."""

    def loss(self, batch: ObjectiveBatch) -> torch.Tensor:
        section, present = self.objective.section, pairs_present(batch.labels)
        beta = section.beta

        def margin(rows: torch.Tensor) -> torch.Tensor:
            """Return chosen minus rejected of a value per row [R]; 0 for padding."""
            difference = rows[0::2] - rows[1::2]
            return torch.where(present, difference, torch.zeros_like(difference))

        # Implicit rewards r / beta of rows: log ratio to the reference, or without a reference the
        # mean log-probability per token.
        rewards = batch.row_means
        if batch.reference_sums is not None:
            rewards = batch.row_sums - batch.reference_sums
        if section.loss == "sigmoid":
            # DPO (arXiv 2305.18290, equation 7): -log sigma(beta (r_w - r_l)), where r is the log
            # ratio to the reference.
            losses = -F.logsigmoid(beta * margin(rewards))
        elif section.loss == "ipo":
            # IPO (arXiv 2310.12036, equation 17): (r_w - r_l - 1 / (2 beta))^2, with r the log
            # ratio to the reference per token, as in TRL.
            losses = (margin(rewards / batch.row_lengths.clamp(min=1)) - 1 / (2 * beta)) ** 2
        elif section.loss == "simpo":
            # SimPO (arXiv 2405.14734, equation 6): -log sigma(beta (m_w - m_l) - gamma), where m is
            # the mean log-probability per token.
            losses = -F.logsigmoid(beta * margin(batch.row_means) - section.gamma)
        else:
            # ORPO (arXiv 2403.07691, equations 6 and 7): -log p_w - beta log sigma(log(odds_w /
            # odds_l)), with odds = p / (1 - p) and the mean log-probability per token as log p.
            log_p = batch.row_means
            losses = -log_p[0::2] - beta * F.logsigmoid(margin(log_p - _log1mexp(log_p)))

        # Metrics and the loss are of pairs that are not padding.
        weights = present.float()
        rewards, sums = beta * rewards.detach(), batch.row_sums.detach()
        record_rewards(rewards[0::2], rewards[1::2], weights)
        for name, values in (("logps/chosen", sums[0::2]), ("logps/rejected", sums[1::2])):
            record(name, (values * weights).mean(), weight=float(len(losses)))
        return (losses * weights).sum()


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) of x <= 0, stable at both ends (Maechler 2012); -inf at 0 is avoided
    by the smallest normal number."""
    values = values.clamp(max=-torch.finfo(values.dtype).tiny)
    is_small = values > -math.log(2)
    log_of_small = torch.log(-torch.expm1(torch.where(is_small, values, -torch.ones_like(values))))
    log_of_large = torch.log1p(-torch.exp(torch.where(is_small, -torch.ones_like(values), values)))
    return torch.where(is_small, log_of_small, log_of_large)
