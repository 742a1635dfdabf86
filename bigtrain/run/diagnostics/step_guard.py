"""Steps that would harm the run: left out, and where they do not end, gone back from.

A step is bad when its loss or gradient norm is not finite, and, with ``guard.spike_sigma``, when
either lies far above what it was in the last steps. Its update is not made; its samples count as
read and the learning rate goes on. After ``guard.max_consecutive`` such steps in a row the run goes
back to the newest checkpoint without one, and on with the samples that follow: all between are
passed over, as in the training of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
Going over the good ones once more would end at the same bad ones with the same weights.

Everything is decided by figures that are the same on every rank, and by `GuardState`, which
every checkpoint holds: a run that goes on from one decides as the run that wrote it did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bigtrain.engine.optimizers.skip_step import SkipPolicy, StepStats
from bigtrain.run.session import Session
from bigtrain.run.state import GuardState, TrainState
from bigtrain.settings.sections.failures import GuardSection

# Of a normal distribution, the standard deviation over the median absolute deviation.
_SIGMA_PER_MAD = 1.4826
# Figures that hardly vary: what is within this part of the median is never a spike.
_LEAST_SPREAD = 1e-3


class Guard:
    """Judges the steps of a run. `skip_policy`, None where the guard is off, goes to
    `TrainEngine.train_step`, which calls it on every rank with the same figures."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._section: GuardSection = session.run.config.guard
        self._figures: StepStats | None = None
        self._reason: str | None = None
        self._state = GuardState()
        self.skip_policy: SkipPolicy | None = self._judge if self._section.enabled else None

    def _judge(self, figures: StepStats) -> bool:
        self._figures = figures
        self._reason = skip_reason(figures, self._state, self._section)
        return self._reason is None

    def begin(self, state: TrainState) -> None:
        """A step begins at `state`."""
        self._state, self._figures, self._reason = state.guard, None, None

    def end(self, before: TrainState, after: TrainState) -> TrainState:
        """The state `after` a step, with what the guard makes of it; writes down a bad one."""
        if self._figures is None:
            return after
        if self._reason is None:
            return replace(after, guard=with_good_step(before.guard, self._figures, self._section))
        guard = replace(
            before.guard, num_skipped=before.guard.num_skipped + 1, streak=before.guard.streak + 1
        )
        if self._session.metrics is not None:
            self._session.metrics.log_event(
                "skipped",
                step=after.step,
                first_sample=before.samples,
                num_samples=after.samples - before.samples,
                reason=self._reason,
                loss=self._figures.loss,
                grad_norm=self._figures.grad_norm,
                consecutive=guard.streak,
            )
            self._session.say(
                f"step {after.step}: update left out, {self._reason} (samples {before.samples} to "
                f"{after.samples - 1}; {guard.streak} in a row, {guard.num_skipped} in all)"
            )
        return replace(after, guard=guard)

    def rolls_back(self, state: TrainState) -> bool:
        """Whether so many steps in a row were bad that the run goes back."""
        return self._reason is not None and state.guard.streak >= self._section.max_consecutive


def skip_reason(figures: StepStats, state: GuardState, section: GuardSection) -> str | None:
    """Why the update of a step is not to be made; None where it is. Pure."""
    kinds = (
        ("loss", figures.loss, state.losses),
        ("gradient norm", figures.grad_norm, state.norms),
    )
    for name, value, _ in kinds:
        if not math.isfinite(value):
            return f"{name} is not finite"
    for name, value, recent in kinds:
        if section.spike_sigma is not None and len(recent) >= section.window:
            centre, spread = center_and_spread(recent[-section.window :])
            if value > centre + section.spike_sigma * spread:
                return (
                    f"{name} {value:.4g} is {(value - centre) / spread:.1f} sigma above the median "
                    f"{centre:.4g} of the last {section.window} steps"
                )
    return None


def center_and_spread(recent: Sequence[float]) -> tuple[float, float]:
    """Median of `recent`, and the standard deviation that their median absolute deviation tells."""
    centre = median(recent)
    deviation = median(abs(value - centre) for value in recent)
    return centre, max(_SIGMA_PER_MAD * deviation, _LEAST_SPREAD * abs(centre), math.ulp(centre))


def with_good_step(state: GuardState, figures: StepStats, section: GuardSection) -> GuardState:
    """The state after a step that was made. Figures are kept only where spikes are looked for."""
    if section.spike_sigma is None:
        return state if state.streak == 0 else replace(state, streak=0)
    keep = section.window - 1
    return replace(
        state,
        streak=0,
        losses=(*(state.losses[-keep:] if keep else ()), figures.loss),
        norms=(*(state.norms[-keep:] if keep else ()), figures.grad_norm),
    )
