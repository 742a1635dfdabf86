from __future__ import annotations

from typing import Any

import pytest

from bigtrain.run.state import BestSoFar, TrainState, after_evaluation, has_stopped, is_over
from bigtrain.settings.run_config import RunConfig
from tests.support.run_trees import run_config


def config_of(**evaluation: Any) -> RunConfig:
    usual = {"every_steps": 1, "tasks_every_steps": 1, "tasks": ["t"]}
    return run_config(train={"steps": 100}, evaluation={**usual, **evaluation})


def run(config: RunConfig, values: list[float | None]) -> list[tuple[float | None, int, bool]]:
    """Best value, its step and whether the run is over after each evaluation, one a step."""
    state, rows = TrainState(), []
    for step, value in enumerate(values, 1):
        state = TrainState(step=step, best=state.best)
        figures = {} if value is None else {config.evaluation.best.metric: value}
        state = after_evaluation(config, state, figures)
        rows.append((state.best.value, state.best.step, is_over(config, state)))
    return rows


def test_a_run_ends_when_nothing_is_better_for_long() -> None:
    config = config_of(early_stopping={"patience": 2, "min_delta": 0.1})
    assert run(config, [3.0, 2.0, 1.95, None, 1.8, 1.75, 1.71]) == [
        (3.0, 1, False),
        (2.0, 2, False),
        (1.95, 3, False),  # the best one, though not by more than 0.1
        (1.95, 3, False),  # not measured: counts as nothing
        (1.8, 5, False),  # better than 2.0 by more than 0.1: the patience starts again
        (1.75, 6, False),
        (1.71, 7, True),
    ]


def test_higher_is_better() -> None:
    best = {"metric": "tasks/t/acc", "mode": "max"}
    config = config_of(best=best, early_stopping={"patience": 1})
    assert run(config, [0.1, 0.5, 0.4]) == [(0.1, 1, False), (0.5, 2, False), (0.5, 2, True)]


def test_another_metric_or_more_patience_goes_on() -> None:
    stopped = TrainState(step=9, best=BestSoFar("held_out_loss", 1.0, 3, 2))
    assert has_stopped(config_of(early_stopping={"patience": 2}), stopped)
    assert not has_stopped(config_of(early_stopping={"patience": 3}), stopped)
    assert not has_stopped(config_of(), stopped)
    other = config_of(best={"metric": "held_out_perplexity"}, early_stopping={"patience": 1})
    assert not has_stopped(other, stopped)
    state = after_evaluation(other, stopped, {"held_out_perplexity": 7.0, "held_out_loss": 0.5})
    assert state.best == BestSoFar("held_out_perplexity", 7.0, 9, 0, 7.0)


@pytest.mark.parametrize("tree", [None, {"metric": "held_out_loss", "value": 1.0, "step": 3}])
def test_checkpoints_may_be_older(tree: dict[str, Any] | None) -> None:
    assert BestSoFar.from_json(tree) == (BestSoFar(**tree) if tree else BestSoFar())
