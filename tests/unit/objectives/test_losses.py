"""Losses of objectives, of numbers that are given, against the equations of their papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.metrics.recording import Recorder
from bigtrain.objectives.losses.passes import make_objective
from bigtrain.objectives.losses.preference import LOSSES
from bigtrain.objectives.preference import PairLoss
from tests.support.run_trees import run_config

ROWS, TOKENS, NUM_LABELS = 8, 6, 3
BETA, GAMMA, DESIRABLE, UNDESIRABLE, CENTERING = 0.7, 0.3, 0.8, 1.4, 0.25

Loss = Callable[["GivenPasses", MicroBatch], torch.Tensor]
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
sigma = torch.sigmoid
SMOOTHING, SFT_WEIGHT = 0.1, 0.3


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


def of_sides(formula: Formula, *, per_token: bool = False) -> Loss:
    """Return the loss whose equation is `formula`, of the log ratios of chosen and rejected
    answers to the reference, in float64."""

    def loss(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
        sums, base, lengths = rows_of(passes, batch)
        ratios = (sums - base).double() / (lengths if per_token else 1)
        return formula(ratios[0::2], ratios[1::2])

    return loss


def exo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Equation 16 of arXiv 2402.00856: a Kullback-Leibler divergence."""
    model = torch.stack([BETA * chosen, BETA * rejected]).log_softmax(0)
    wanted = torch.tensor([1 - SMOOTHING, SMOOTHING], dtype=torch.float64)
    return torch.nn.functional.kl_div(
        wanted.log().unsqueeze(-1), model, log_target=True, reduction="none"
    ).sum(0)


def discopop(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Equation 5 of arXiv 2406.08414."""
    margin = BETA * (chosen - rejected)
    share = sigma(margin / 0.05)
    return (1 - share) * (1 + (-margin).exp()).log() + share * (-margin).exp()


SIDES: dict[str, Loss] = {
    "sigmoid": of_sides(
        lambda w, r: (
            -(1 - SMOOTHING) * sigma(BETA * (w - r)).log() - SMOOTHING * sigma(BETA * (r - w)).log()
        )
    ),
    "sigmoid_norm": of_sides(lambda w, r: -sigma(BETA * (w - r)).log(), per_token=True),
    "hinge": of_sides(lambda w, r: (1 - BETA * (w - r)).clamp(min=0)),
    "robust": of_sides(
        lambda w, r: (
            (
                SMOOTHING * sigma(BETA * (r - w)).log()
                - (1 - SMOOTHING) * sigma(BETA * (w - r)).log()
            )
            / (1 - 2 * SMOOTHING)
        )
    ),
    "exo_pair": of_sides(exo),
    "nca_pair": of_sides(
        lambda w, r: -sigma(BETA * w).log() - (sigma(-BETA * w).log() + sigma(-BETA * r).log()) / 2
    ),
    "bco_pair": of_sides(lambda w, r: -sigma(BETA * w).log() - sigma(-BETA * r).log()),
    "sppo_hard": of_sides(lambda w, r: (w - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2),
    "apo_zero": of_sides(lambda w, r: sigma(-BETA * w) + sigma(BETA * r)),
    "apo_down": of_sides(lambda w, r: sigma(BETA * w) + sigma(BETA * (r - w))),
    "discopop": of_sides(discopop),
}
"""Equations of losses of log ratios to the reference."""


def rpo(passes: GivenPasses, batch: MicroBatch) -> torch.Tensor:
    """Equation 1 of arXiv 2404.19733."""
    sums, _, lengths = rows_of(passes, batch)
    return sigmoid(passes, batch) - SFT_WEIGHT * (sums / lengths)[0::2]


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


SMOOTHED = {"label_smoothing": SMOOTHING}
CASES: list[tuple[dict[str, Any], Loss, float]] = [
    (PREFERENCES, sigmoid, 0.0),
    (PREFERENCES | {"sft_weight": SFT_WEIGHT}, rpo, 0.0),
    *(
        (
            PREFERENCES
            | {"loss": name}
            | (SMOOTHED if name in ("sigmoid", "robust", "exo_pair") else {}),
            loss,
            0.0,
        )
        for name, loss in SIDES.items()
    ),
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


def test_every_loss_of_pairs_has_an_equation() -> None:
    named = {
        section.get("loss", "sigmoid") for section, *_ in CASES if section["type"] == "preference"
    }
    assert named == set(get_args(PairLoss)) == set(LOSSES)


@pytest.mark.parametrize(("section", "loss", "divergence"), CASES)
def test_metrics_are_means_without_padding(
    section: dict[str, Any], loss: Loss, divergence: float
) -> None:
    """One pair (or answer) of four is padding."""
    config = run_config(
        model={"path": "base"},
        batch={"sequence_length": TOKENS, "global_batch_size": 4},
        objective=section,
    )
    passes, recorder = GivenPasses(divergence), Recorder()
    batch, objective = batch_of(passes), make_objective(config.objective)
    with recorder.collecting():
        objective.summed_loss(passes, *[*objective.prepare(passes, [batch])] * 2)
    recorded = recorder.take()
    kind = config.objective.kind
    metrics = {name: values.value for name, values in recorded.items()}
    assert {*metrics, *kind.derived_metrics(metrics)} == {*(kind.metrics or ())}
    if "rewards/margins" in recorded:
        difference = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        assert metrics["rewards/margins"] == pytest.approx(difference, abs=1e-6)
        assert recorded["rewards/margins"].weight == 3
    if "logps/chosen" in recorded and "rewards/margins" in recorded:
        sums, *_ = rows_of(passes, batch)
        assert metrics["logps/chosen"] == pytest.approx(float(sums[0::2].mean()), rel=1e-6)
    if "accuracy" in metrics:
        present = (batch.labels != IGNORED_LABEL).any(-1)
        right = (passes.rewards.argmax(-1) == batch.classes)[present]
        assert metrics["accuracy"] == pytest.approx(float(right.float().mean()))
