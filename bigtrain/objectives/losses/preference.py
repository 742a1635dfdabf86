"""Losses of pairs of answers: DPO and its variants, SimPO and ORPO.

Every loss of `LOSSES` is a function of the rewards of pairs, [pairs] in float32, and of the
section. A reward is the log-probability of the answer minus its log-probability under the
reference; per token for the losses of `_PER_TOKEN`. Without a reference it is the mean
log-probability per token. Losses with a reference are computed as in TRL 1.16
(trl/trainer/dpo_trainer.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F

from bigtrain.objectives.losses.objective_batch import ObjectiveBatch
from bigtrain.objectives.losses.passes import (
    LogProbabilityLoss,
    pairs_present,
    record_mean,
    record_rewards,
)
from bigtrain.objectives.preference import PairLoss
from bigtrain.objectives.section import ObjectiveSection

PairFunction = Callable[[torch.Tensor, torch.Tensor, ObjectiveSection], torch.Tensor]
"""Function of chosen and rejected rewards [pairs] and the section: losses [pairs]."""


def _sigmoid(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return DPO's losses (arXiv 2305.18290, equation 7), -log sigma(beta (r_w - r_l)), of which
    the share `label_smoothing` is of exchanged answers (cDPO)."""
    margins, smoothing = section.beta * (chosen_rewards - rejected_rewards), section.label_smoothing
    losses = -F.logsigmoid(margins)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * F.logsigmoid(-margins)
    return losses


def _hinge(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return the losses of SLiC (arXiv 2305.10425), max(0, 1 - beta (r_w - r_l))."""
    return torch.relu(1 - section.beta * (chosen_rewards - rejected_rewards))


def _ipo(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return IPO's losses (arXiv 2310.12036, equation 17), (r_w - r_l - 1 / (2 beta))^2."""
    return (chosen_rewards - rejected_rewards - 1 / (2 * section.beta)) ** 2


def _robust(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return DPO's losses, whose mean is not biased by exchanged answers (arXiv 2403.00409)."""
    margins, smoothing = section.beta * (chosen_rewards - rejected_rewards), section.label_smoothing
    exchanged = smoothing * F.logsigmoid(-margins)
    return (exchanged - (1 - smoothing) * F.logsigmoid(margins)) / (1 - 2 * smoothing)


def _exo_pair(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return EXO's losses (arXiv 2402.00856, equation 16): the divergence of
    (sigma(m), sigma(-m)) with m = beta (r_w - r_l) from (1 - smoothing, smoothing)."""
    margins, smoothing = section.beta * (chosen_rewards - rejected_rewards), section.label_smoothing
    chosen_term = torch.sigmoid(margins) * (F.logsigmoid(margins) - math.log1p(-smoothing))
    rejected_term = torch.sigmoid(-margins) * (F.logsigmoid(-margins) - math.log(smoothing))
    return chosen_term + rejected_term


def _nca_pair(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return the losses of noise contrastive alignment (arXiv 2402.05369)."""
    scaled_chosen, scaled_rejected = section.beta * chosen_rewards, section.beta * rejected_rewards
    noise_terms = F.logsigmoid(-scaled_chosen) + F.logsigmoid(-scaled_rejected)
    return -F.logsigmoid(scaled_chosen) - 0.5 * noise_terms


def _bco_pair(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return the losses of a classifier of both answers (arXiv 2404.04656, without the mean of
    rewards that is subtracted there, as in TRL)."""
    return -F.logsigmoid(section.beta * chosen_rewards) - F.logsigmoid(
        -section.beta * rejected_rewards
    )


def _sppo_hard(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return SPPO's losses (arXiv 2405.00675, equation 4.7) with probabilities 1 and 0."""
    target = 0.5 / section.beta
    return (chosen_rewards - target) ** 2 + (rejected_rewards + target) ** 2


def _apo_zero(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return APO-zero's losses (arXiv 2408.06266, equation 7)."""
    return (
        1
        - torch.sigmoid(section.beta * chosen_rewards)
        + torch.sigmoid(section.beta * rejected_rewards)
    )


def _apo_down(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return APO-down's losses (arXiv 2408.06266, equation 8)."""
    margins = section.beta * (chosen_rewards - rejected_rewards)
    return torch.sigmoid(section.beta * chosen_rewards) + 1 - torch.sigmoid(margins)


_DISCOPOP_TEMPERATURE = 0.05


def _discopop(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return the losses that DiscoPOP found (arXiv 2406.08414, equation 5, with its temperature):
    logistic and exponential, mixed by the margin."""
    margins = section.beta * (chosen_rewards - rejected_rewards)
    exponential_share = torch.sigmoid(margins / _DISCOPOP_TEMPERATURE)
    logistic, exponential = -F.logsigmoid(margins), torch.exp(-margins)
    return logistic * (1 - exponential_share) + exponential * exponential_share


def _simpo(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return SimPO's losses (arXiv 2405.14734, equation 6), -log sigma(beta (m_w - m_l) - gamma)
    of mean log-probabilities m."""
    return -F.logsigmoid(section.beta * (chosen_rewards - rejected_rewards) - section.gamma)


def _orpo(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, section: ObjectiveSection
) -> torch.Tensor:
    """Return ORPO's losses (arXiv 2403.07691, equations 6 and 7), -log p_w - beta log
    sigma(log(odds_w / odds_l)), with odds = p / (1 - p) and mean log-probabilities as log p."""
    log_odds = (chosen_rewards - _log1mexp(chosen_rewards)) - (
        rejected_rewards - _log1mexp(rejected_rewards)
    )
    return -chosen_rewards - section.beta * F.logsigmoid(log_odds)


LOSSES: Mapping[PairLoss, PairFunction] = MappingProxyType(
    {
        "sigmoid": _sigmoid,
        "sigmoid_norm": _sigmoid,  # length-normalized DPO (Tulu 3, arXiv 2411.15124)
        "hinge": _hinge,
        "ipo": _ipo,
        "robust": _robust,
        "exo_pair": _exo_pair,
        "nca_pair": _nca_pair,
        "bco_pair": _bco_pair,
        "sppo_hard": _sppo_hard,
        "apo_zero": _apo_zero,
        "apo_down": _apo_down,
        "discopop": _discopop,
        "simpo": _simpo,
        "orpo": _orpo,
    }
)
_PER_TOKEN = ("sigmoid_norm", "ipo")
"""Losses of log ratios to the reference per token; without a reference rewards are per token."""


class PreferenceLoss(LogProbabilityLoss):
    """Losses of pairs of answers, with metrics under TRL's names."""

    def loss(self, batch: ObjectiveBatch) -> torch.Tensor:
        section, present = self.objective.section, pairs_present(batch.labels)
        # Rewards of rows: log ratio to the reference, or without one the mean log-probability. The
        # inputs of some losses are log ratios per token, while the metrics are log ratios of rows.
        loss_inputs = rewards = batch.row_means
        if self.objective.needs_reference:
            assert batch.reference_sums is not None
            loss_inputs = rewards = batch.row_sums - batch.reference_sums
            if section.loss in _PER_TOKEN:
                loss_inputs = rewards / batch.row_lengths.clamp(min=1)

        # Padding has no loss; a row of padding may be next to a row with targets.
        def side(rows: torch.Tensor, first_row: int) -> torch.Tensor:  # 0: chosen, 1: rejected
            return torch.where(present, rows[first_row::2], torch.zeros_like(rows[first_row::2]))

        losses = LOSSES[section.loss](side(loss_inputs, 0), side(loss_inputs, 1), section)
        if section.sft_weight:
            # RPO (arXiv 2404.19733, equation 1): -weight log p_w per token of the chosen answer.
            losses = losses - section.sft_weight * batch.row_means[0::2]

        # Metrics and the loss are of pairs that are not padding.
        rewards, sums = section.beta * rewards.detach(), batch.row_sums.detach()
        record_rewards(rewards[0::2], rewards[1::2], present, batch.num_units)
        record_mean("logps/chosen", sums[0::2], present, batch.num_units)
        record_mean("logps/rejected", sums[1::2], present, batch.num_units)
        return (losses * present.float()).sum()


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) of x <= 0, stable at both ends (Maechler 2012); -inf at 0 is avoided
    by the smallest normal number."""
    values = values.clamp(max=-torch.finfo(values.dtype).tiny)
    is_small = values > -math.log(2)
    log_of_small = torch.log(-torch.expm1(torch.where(is_small, values, -torch.ones_like(values))))
    log_of_large = torch.log1p(-torch.exp(torch.where(is_small, -torch.ones_like(values), values)))
    return torch.where(is_small, log_of_small, log_of_large)
