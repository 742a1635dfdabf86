"""Bad steps: their updates are skipped, and after several in a row the run rolls back.

A step is bad when its loss or gradient norm is not finite, or, with ``guard.spike_sigma``, far
above its last values. Its samples count as read and the learning-rate schedule advances. After
``guard.max_consecutive`` bad steps the run rolls back to the newest checkpoint without one before
it and continues with the next samples (PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 5.1):
replaying the samples would repeat the bad steps.

Decisions depend only on stats that are equal on every rank and on `GuardState`, which every
checkpoint contains: a resumed run decides alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bigtrain.engine.optimizers.skip_step import SkipPolicy, StepStats
from bigtrain.run.run_log import RunLog
from bigtrain.run.state import GuardState, TrainState
from bigtrain.settings.sections.running import GuardSection

# Standard deviation over median absolute deviation of a normal distribution.
_SIGMA_PER_MAD = 1.4826
# A value within this fraction of the median is never a spike, regardless of the spread of the
# values.
_LEAST_SPREAD = 1e-3


class Guard:
    """Policy that skips bad updates of a run. `skip_policy` (None if the guard is off) is for
    `TrainEngine.train_step`, which calls it on every rank with equal stats."""

    def __init__(self, section: GuardSection, log: RunLog) -> None:
        self._section, self._log = section, log
        self._stats: StepStats | None = None
        self._reason: str | None = None
        self._state = GuardState()
        self.skip_policy: SkipPolicy | None = self._is_good if self._section.enabled else None

    def _is_good(self, stats: StepStats) -> bool:
        self._stats = stats
        self._reason = skip_reason(stats, self._state, self._section)
        return self._reason is None

    def begin(self, state: TrainState) -> None:
        """Begin a step at `state`."""
        self._state, self._stats, self._reason = state.guard, None, None

    def end(self, before: TrainState, after: TrainState) -> TrainState:
        """Return the state `after` a step with the guard's state updated; log a skipped update."""
        if self._stats is None:
            return after
        if self._reason is None:
            return replace(after, guard=with_good_step(before.guard, self._stats, self._section))
        guard = replace(
            before.guard, num_skipped=before.guard.num_skipped + 1, streak=before.guard.streak + 1
        )
        self._log.event(
            "skipped",
            after,
            first_sample=before.samples,
            reason=self._reason,
            loss=self._stats.loss,
            grad_norm=self._stats.grad_norm,
            consecutive=guard.streak,
        )
        self._log.info(
            f"step {after.step}: update skipped, {self._reason} (samples {before.samples} to "
            f"{after.samples - 1}; {guard.streak} in a row, {guard.num_skipped} in total)"
        )
        return replace(after, guard=guard)

    def rolls_back(self, state: TrainState) -> bool:
        """Return whether enough steps in a row were bad for a rollback."""
        return self._reason is not None and state.guard.streak >= self._section.max_consecutive


def skip_reason(stats: StepStats, state: GuardState, section: GuardSection) -> str | None:
    """Return why the update of a step is skipped; None if it is applied. Pure."""
    # Name, value at this step, and values at the last applied updates.
    measured = (
        ("loss", stats.loss, state.losses),
        ("gradient norm", stats.grad_norm, state.norms),
    )
    for name, value, _ in measured:
        if not math.isfinite(value):
            return f"{name} is not finite"
    if section.spike_sigma is None:
        return None
    for name, value, recent in measured:
        if len(recent) >= section.window:
            center, sigma = center_and_spread(recent[-section.window :])
            if value > center + section.spike_sigma * sigma:
                return (
                    f"{name} {value:.4g} is {(value - center) / sigma:.1f} sigma above the median "
                    f"{center:.4g} of the last {section.window} steps"
                )
    return None


def center_and_spread(recent: Sequence[float]) -> tuple[float, float]:
    """Return the median of `recent`, and the standard deviation estimated from the median absolute
    deviation, with a lower limit."""
    center = median(recent)
    deviation = median(abs(value - center) for value in recent)
    return center, max(_SIGMA_PER_MAD * deviation, _LEAST_SPREAD * abs(center), math.ulp(center))


def with_good_step(state: GuardState, stats: StepStats, section: GuardSection) -> GuardState:
    """Return the state after an applied update. Stats are kept only with ``guard.spike_sigma``."""
    if section.spike_sigma is None:
        return state if state.streak == 0 else replace(state, streak=0)
    losses, norms = (*state.losses, stats.loss), (*state.norms, stats.grad_norm)
    window = section.window
    return replace(state, streak=0, losses=losses[-window:], norms=norms[-window:])
