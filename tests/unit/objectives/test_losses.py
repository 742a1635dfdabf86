"""Losses of objectives, of numbers that are given, against the equations of their papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.objectives.losses.passes import make_objective
from tests.support.run_trees import run_config

ROWS, TOKENS, NUM_LABELS = 8, 6, 3
BETA, GAMMA, DESIRABLE, UNDESIRABLE, CENTERING = 0.7, 0.3, 0.8, 1.4, 0.25

Loss = Callable[["GivenPasses", MicroBatch], torch.Tensor]


class GivenPasses:
    """Passes whose results are given: log-probabilities of the model and of its reference, of each
    target, and scores. divergence: added to the log-probabilities of mismatched answers."""

    reports_loss = True

    def __init__(self, divergence: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.policy, self.base = -3 * torch.rand(2, ROWS, TOKENS, generator=generator) - 0.01
        self.rewards = torch.randn(ROWS, NUM_LABELS, generator=generator)
        self.divergence = divergence
        self.is_reference = False

    def log_probabilities(self, batch: MicroBatch, _: MicroBatch) -> tuple[torch.Tensor, Any]:
        values = self.base if self.is_reference else self.policy
        rows = batch.input_ids[:, 0]
        return values[rows] * (batch.labels != IGNORED_LABEL), None

    def scores(self, batch: MicroBatch, _: MicroBatch) -> tuple[torch.Tensor, Any]:
        return self.rewards[batch.input_ids[:, 0]], None

    def row_sums(self, batches: Iterable[MicroBatch]) -> Iterator[Any]:
        for batch in batches:
            is_present = (batch.labels != IGNORED_LABEL).any(-1)
            sums = self.log_probabilities(batch, batch)[0].sum(-1)
            yield batch, batch, sums + self.divergence * is_present

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of two ranks, one of whose mismatched answers diverge by 2 more."""
        return 2 * values + values[1] * torch.tensor([2.0, 0.0], dtype=values.dtype)

    def reference(self) -> Any:
        return nullcontext()

    def cross_entropy(self, *_: Any) -> Any:
        raise NotImplementedError


def batch_of(passes: GivenPasses) -> MicroBatch:
    """Return rows whose tokens are their numbers, with stored scores of the reference."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1, 9, (ROWS, TOKENS), generator=generator)
    lengths = torch.tensor([[6], [3], [2], [5], [0], [0], [4], [1]])
    labels[torch.arange(TOKENS) >= lengths] = IGNORED_LABEL
    scores = (passes.base * (labels != IGNORED_LABEL)).sum(-1)
    return MicroBatch(
        torch.arange(ROWS).unsqueeze(-1).expand(ROWS, TOKENS),
        labels,
        reference=scores,
        desirable=torch.tensor([True, False, False, True]).repeat_interleave(2),
        classes=torch.arange(ROWS) % NUM_LABELS,
    )


def rows_of(
    passes: GivenPasses, batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities of rows that are present, those of the reference, and lengths."""
    targets = batch.labels != IGNORED_LABEL
    present = targets.any(-1)
    sums, base = ((values * targets).sum(-1)[present] for values in (passes.policy, passes.base))
    return sums, base, targets.sum(-1)[present]


def sigmoid(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    """Equation 7 of arXiv 2305.18290."""
    sums, base, _ = rows_of(passes, batch)
    rewards = BETA * (sums - base)
    return softplus(rewards[1::2] - rewards[0::2])


def ipo(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    """Equation 17 of arXiv 2310.12036, of means over tokens as in TRL."""
    sums, base, lengths = rows_of(passes, batch)
    means = (sums - base) / lengths
    return (means[0::2] - means[1::2] - 1 / (2 * BETA)).square()


def simpo(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    """Equation 6 of arXiv 2405.14734."""
    sums, _, lengths = rows_of(passes, batch)
    means = BETA * sums / lengths
    return softplus(GAMMA - means[0::2] + means[1::2])


def orpo(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    """Equations 6 and 7 of arXiv 2403.07691."""
    sums, _, lengths = rows_of(passes, batch)
    likelihoods = (sums / lengths).exp()
    odds = likelihoods / (1 - likelihoods)
    return -likelihoods[0::2].log() - BETA * logsigmoid((odds[0::2] / odds[1::2]).log())


def kto(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    """Equations 7 and 8 of arXiv 2402.01306."""
    sums, base, _ = rows_of(passes, batch)
    rewards = sums - base
    divergence = float(rewards[1::2].mean()) + passes.divergence + 1.0  # of two ranks
    assert batch.desirable is not None
    losses = []
    for reward, likes in zip(rewards[0::2], [True, False, True], strict=True):
        margin = reward - max(divergence, 0.0)
        value = torch.sigmoid(BETA * (margin if likes else -margin))
        losses.append((DESIRABLE if likes else UNDESIRABLE) * (1 - value))
    return torch.stack(losses)


def reward(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    """Bradley and Terry, and arXiv 2312.09244."""
    present = (batch.labels != IGNORED_LABEL).any(-1)
    scores = passes.rewards[present, 0]
    chosen, rejected = scores[0::2], scores[1::2]
    return softplus(rejected - chosen) + CENTERING * (chosen + rejected) ** 2


def classification(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    assert batch.classes is not None
    present = (batch.labels != IGNORED_LABEL).any(-1)
    scores = passes.rewards.log_softmax(-1)
    return -scores.gather(-1, batch.classes.unsqueeze(-1))[present, 0]


PREFERENCES = {"type": "preference", "beta": BETA}
RATED = {
    "type": "kto",
    "beta": BETA,
    "desirable_weight": DESIRABLE,
    "undesirable_weight": UNDESIRABLE,
}


CASES: list[tuple[dict[str, Any], Loss, float]] = [
    (PREFERENCES, sigmoid, 0.0),
    ({**PREFERENCES, "loss": "ipo"}, ipo, 0.0),
    ({**PREFERENCES, "loss": "simpo", "gamma": GAMMA}, simpo, 0.0),
    ({**PREFERENCES, "loss": "orpo"}, orpo, 0.0),
    (RATED, kto, 3.0),
    (RATED, kto, -3.0),
    ({"type": "reward", "center_rewards_coefficient": CENTERING}, reward, 0.0),
    ({"type": "classification"}, classification, 0.0),
]
"""Sections, with the loss of their equation, and the divergence of mismatched answers."""


@pytest.mark.parametrize(("section", "loss", "divergence"), CASES)
def test_a_loss_is_that_of_its_equation(
    section: dict[str, Any], loss: Loss, divergence: float
) -> None:
    batch_section = {"sequence_length": TOKENS, "global_batch_size": 4}
    config = run_config(model={"path": "base"}, batch=batch_section, objective=section)
    passes = GivenPasses(divergence)
    batch, objective = batch_of(passes), make_objective(config.objective)
    expected = loss(passes, batch)
    objective.prepare(passes, [batch])
    summed, _ = objective.summed_loss(passes, batch, batch)
    assert float(summed) == pytest.approx(float(expected.sum()), rel=1e-5)
    assert objective.count(batch.labels) == len(expected)
