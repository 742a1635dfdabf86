"""Which steps are bad, and what is remembered of the good ones."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from bigtrain.engine.optimizers.skip_step import StepStats
from bigtrain.run.diagnostics.step_guard import center_and_spread, skip_reason, with_good_step
from bigtrain.run.state import GuardState
from bigtrain.settings.sections.running import GuardSection

STEADY = GuardState(losses=(2.0, 2.1, 1.9, 2.0, 2.05), norms=(1.0, 1.2, 0.9, 1.1, 1.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_bad_from_the_first_step(value: float) -> None:
    section = GuardSection()
    assert skip_reason(StepStats(value, 1.0), GuardState(), section) == "loss is not finite"
    assert (
        skip_reason(StepStats(2.0, value), GuardState(), section) == "gradient norm is not finite"
    )
    assert skip_reason(StepStats(1e30, 1e30), GuardState(), section) is None


def test_spikes_are_told_by_median_and_median_deviation() -> None:
    section = GuardSection(spike_sigma=6, window=5)
    centre, spread = center_and_spread(STEADY.losses)
    assert centre == 2.0
    assert spread == pytest.approx(1.4826 * 0.05)
    assert skip_reason(StepStats(2.4, 1.0), STEADY, section) is None
    assert skip_reason(StepStats(0.1, 0.0), STEADY, section) is None  # falling is no spike
    reason = skip_reason(StepStats(2.5, 1.0), STEADY, section)
    assert reason == "loss 2.5 is 6.7 sigma above the median 2 of the last 5 steps"
    reason = skip_reason(StepStats(2.0, 50.0), STEADY, section)
    assert reason is not None
    assert reason.startswith("gradient norm 50 is ")


def test_one_spike_before_does_not_hide_the_next() -> None:
    section = GuardSection(spike_sigma=6, window=5)
    state = with_good_step(STEADY, StepStats(100.0, 1.0), section)
    assert skip_reason(StepStats(100.0, 1.0), state, section) is not None


def test_nothing_is_a_spike_before_the_window_is_full() -> None:
    section = GuardSection(spike_sigma=6, window=6)
    assert skip_reason(StepStats(99.0, 99.0), STEADY, section) is None


def test_figures_that_do_not_vary() -> None:
    section = GuardSection(spike_sigma=6, window=3)
    state = GuardState(losses=(2.0,) * 3, norms=(0.0,) * 3)
    assert skip_reason(StepStats(2.01, 0.0), state, section) is None
    assert skip_reason(StepStats(2.02, 0.0), state, section) is not None


def test_the_window_moves_and_survives_a_checkpoint() -> None:
    section = GuardSection(spike_sigma=6, window=2)
    state = GuardState(streak=2, num_skipped=7, rolled_back_to=40, num_rollbacks=1)
    for loss in (1.0, 2.0, 3.0):
        state = with_good_step(state, StepStats(loss, loss / 10), section)
    assert state == GuardState(7, 0, (2.0, 3.0), (0.2, 0.3), 40, 1)
    assert GuardState.from_json(json.loads(json.dumps(asdict(state)))) == state
    assert GuardState.from_json(None) == GuardState()
    # Without spikes to look for nothing is kept.
    assert with_good_step(GuardState(), StepStats(1.0, 1.0), GuardSection()) == GuardState()
