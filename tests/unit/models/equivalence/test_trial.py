"""The harness of trials finds and names differences, and refuses trials that would find none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from bigtrain.models.equivalence.proxy_model import add_noise, build_proxy_model
from bigtrain.models.equivalence.trial import (
    GRADIENT,
    LOSS,
    OUTPUT,
    LocalTensor,
    Results,
    Tolerance,
    Trial,
    distances,
    first_difference,
    run_forward,
    training_results,
)
from bigtrain.models.parallel.sharding import Shard

EXACT = {kind: Tolerance() for kind in (OUTPUT, LOSS, GRADIENT)}
ROUNDING = {LOSS: Tolerance(relative=1e-5), GRADIENT: Tolerance(relative=1e-3, common=1e-6)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = CONFIG_MAPPING["llama"](num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    return build_proxy_model(config, "auto", usable=add_noise, sequence_length=16)


def scaled(name: str, factor: float) -> Any:
    def run(model: PreTrainedModel) -> Results:
        with model.get_parameter(name).register_hook(lambda gradient: factor * gradient):
            return training_results(model)

    return run


def test_every_parameter_with_a_wrong_gradient_is_named(model: PreTrainedModel) -> None:
    for name, _ in model.named_parameters():
        difference = Trial(training_results, scaled(name, 1.01), ROUNDING).difference(model)
        assert difference is not None, name
        assert difference.where == f"gradient of {name}"
        assert Trial(training_results, scaled(name, 1 + 1e-5), ROUNDING).difference(model) is None
        assert model.get_parameter(name).grad is None


def test_the_first_kind_is_named_before_its_consequences() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    expected = {OUTPUT: {"logits": one}, LOSS: {"loss": one}, GRADIENT: {"a": one, "b": one}}
    actual = dict(expected)
    for kind, values, where in (
        (GRADIENT, {"a": 1.5 * one, "b": two}, "gradient of b"),
        (LOSS, {"loss": two}, "loss"),
        (OUTPUT, {"logits": two}, "logits"),
    ):
        actual = {**actual, kind: values}
        difference = first_difference(expected, actual, EXACT)
        assert difference is not None
        assert difference.where == where
    assert first_difference(expected, expected, EXACT) is None


@pytest.mark.parametrize(
    "actual",
    [
        {},
        {"a": torch.zeros(3)},
        {"a": torch.tensor([0.0, float("nan")])},
        {"a": torch.zeros(2), "b": torch.zeros(1)},
    ],
    ids=["missing", "other shape", "NaN", "one more"],
)
def test_what_cannot_be_compared_differs(actual: dict[str, torch.Tensor]) -> None:
    expected = {"a": torch.zeros(2)}
    assert max(distances(expected, actual).values()) == float("inf")
    loose = {LOSS: Tolerance(absolute=1e9)}
    assert first_difference({LOSS: expected}, {LOSS: actual}, loose) is not None


def test_a_limit_is_a_sum_of_three_terms() -> None:
    values = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([10.0]), "c": torch.empty(0)}
    limits = Tolerance(relative=1.0, common=0.1, absolute=0.5).limits(values)
    assert limits == {"a": 4.5, "b": 11.5, "c": 1.5}


def test_a_shard_is_compared_with_its_part_within_the_limit_of_the_full_tensor() -> None:
    full = torch.tensor([1.0, 2.0, 300.0, 4.0])
    shard = Shard((4,), 0, ((3, 4), (0, 1)), 3, primary=True)
    local = LocalTensor(torch.tensor([4.2, 1.0, 0.0]), shard)
    assert distances({"a": full}, {"a": local})["a"] == pytest.approx(0.2)
    gradients = {GRADIENT: {"a": full}}, {GRADIENT: {"a": local}}
    assert first_difference(*gradients, {GRADIENT: Tolerance(relative=1e-3)}) is None
    assert first_difference(*gradients, {GRADIENT: Tolerance(relative=1e-4)}) is not None


def test_a_trial_that_would_detect_nothing_is_an_error(model: PreTrainedModel) -> None:
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    tolerances = {OUTPUT: Tolerance(relative=1e-4)}

    def forward(model: PreTrainedModel) -> Results:
        return run_forward(model, input_ids=ids)

    def last_token(model: PreTrainedModel) -> Results:
        return run_forward(model, input_ids=ids.clone().index_fill_(1, torch.tensor([7]), 5))

    assert Trial(forward, forward, tolerances, control=last_token).difference(model) is None
    with pytest.raises(ValueError, match="random weights do not show"):
        Trial(forward, forward, tolerances, control=forward).difference(model)


def test_without_finite_results_nothing_can_be_compared(model: PreTrainedModel) -> None:
    def broken(_: PreTrainedModel) -> Any:
        return {LOSS: {"loss": torch.tensor(float("nan"))}}

    with pytest.raises(ValueError, match="its loss is not finite"):
        Trial(broken, broken, {LOSS: Tolerance(relative=1e-5)}).difference(model)
