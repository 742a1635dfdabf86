"""Best evaluation so far, and early stopping.

Pure: all ranks get the same result from the same metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigtrain.run.state import BestSoFar, TrainState
from bigtrain.settings.run_config import RunConfig


def after_evaluation(
    config: RunConfig, state: TrainState, figures: Mapping[str, float]
) -> TrainState:
    """Return `state` after an evaluation with these `figures`; unchanged if the best metric is not
    among them."""
    section, stopping = config.evaluation.best, config.evaluation.early_stopping
    value = figures.get(section.metric)
    if value is None:
        return state
    best = _comparable(config, state)
    reference = best.value if best.reference is None else best.reference
    by = 0.0 if stopping is None else stopping.min_delta
    if reference is None or section.is_better(value, reference, by):
        best = replace(best, num_since=0, reference=value)
    else:
        best = replace(best, num_since=best.num_since + 1, reference=reference)
    # The best does not depend on `min_delta`, consistent with `export --best` and `keep_best`.
    if best.value is None or section.is_better(value, best.value, 0.0):
        best = replace(best, value=value, step=state.step)
    return replace(state, best=best)


def is_over(config: RunConfig, state: TrainState) -> bool:
    """Return whether a run at `state` has ended: at its last step, or stopped early."""
    return state.step >= config.train.steps or has_stopped(config, state)


def has_stopped(config: RunConfig, state: TrainState) -> bool:
    """Return whether the best metric has not improved for ``early_stopping.patience``
    evaluations."""
    stopping = config.evaluation.early_stopping
    return stopping is not None and _comparable(config, state).num_since >= stopping.patience


def _comparable(config: RunConfig, state: TrainState) -> BestSoFar:
    """Return the best so far; empty if the run resumed with another metric."""
    metric = config.evaluation.best.metric
    return state.best if state.best.metric == metric else BestSoFar(metric)
