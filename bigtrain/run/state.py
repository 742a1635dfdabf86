"""State of a run outside the engine: steps, samples, data phases, guard, best evaluation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.data.samples.phases import Phase
from bigtrain.data.samples.sample_stream import StreamPosition
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig


@dataclass(frozen=True)
class GuardState:
    """State of `bigtrain.run.diagnostics.step_guard`. num_skipped: updates so far. streak: skipped
    steps in a row. losses, norms: of the last applied updates, oldest first, with
    ``guard.spike_sigma``. rolled_back_to: the step the run last rolled back to, num_rollbacks: how
    often in a row."""

    num_skipped: int = 0
    streak: int = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    rolled_back_to: int | None = None
    num_rollbacks: int = 0

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> GuardState:
        """Build from `dataclasses.asdict`; None: a checkpoint older than the guard."""
        tree = tree or {}
        figures = {name: tuple(tree[name]) for name in ("losses", "norms") if name in tree}
        return cls(**{**tree, **figures})


@dataclass(frozen=True)
class BestSoFar:
    """Best evaluation so far, by ``evaluation.best``. value: None before the first one. reference:
    the value that an evaluation must improve by more than ``early_stopping.min_delta`` (None:
    `value`). num_since: evaluations since then without an improvement by more than `min_delta`."""

    metric: str = ""
    value: float | None = None
    step: int = 0
    num_since: int = 0
    reference: float | None = None

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> BestSoFar:
        """Build from `dataclasses.asdict`; None: a checkpoint older than this class."""
        return cls(**(tree or {}))


@dataclass(frozen=True)
class TrainState:
    """Complete state of a run outside the engine: sample order and random streams are functions of
    it and the seed. Samples only grow, also in a rollback (`bigtrain.run.diagnostics.step_guard`).

    `phases`: of the data (`bigtrain.data.samples.phases`), oldest first. `outer_steps`: done with
    other sites. `outer_sent`: the fragment of the last one that is not yet applied to the masters,
    and the step after which it was sent. `outer_tokens`: that the global weights have been trained
    on. `outer_sites`: in the last outer step. `outer_ended`: the last step of the run, if these are
    the weights with which it ended on several sites; else 0. `stopped_steps`: ``train.steps`` of
    the run that a callback ended here; 0: none did. `stream`: position of a stream of samples, set
    when the state is saved.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    phases: tuple[Phase, ...] = ()
    guard: GuardState = GuardState()
    outer_steps: int = 0
    best: BestSoFar = BestSoFar()
    outer_sent: tuple[int, int] | None = None
    outer_tokens: int = 0
    outer_ended: int = 0
    outer_sites: tuple[int, ...] = ()
    stopped_steps: int = 0
    stream: StreamPosition | None = None

    def is_multiple_of(self, every: int | None) -> bool:
        """Return whether something happens after this step that happens `every` steps."""
        return every is not None and self.step % every == 0

    def after_step(self, plan: BatchPlan) -> TrainState:
        """Return the state one optimizer step later."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + plan.global_batch_size,
            tokens=self.tokens + plan.tokens_per_step,
        )


def after_evaluation(
    config: RunConfig, state: TrainState, metrics: Mapping[str, float]
) -> TrainState:
    """Return `state` after an evaluation; unchanged if the best metric is not in `metrics`."""
    criterion, stopping = config.evaluation.best, config.evaluation.early_stopping
    value = metrics.get(criterion.metric)
    if value is None:
        return state
    best = _comparable(config, state)
    # Early stopping compares with the last value that was better by `min_delta`, and counts the
    # evaluations since (`num_since`).
    reference = best.value if best.reference is None else best.reference
    min_delta = 0.0 if stopping is None else stopping.min_delta
    if reference is None or criterion.is_better(value, reference, min_delta):
        best = replace(best, num_since=0, reference=value)
    else:
        best = replace(best, num_since=best.num_since + 1, reference=reference)
    # The best does not depend on `min_delta`, consistent with `export --best` and `keep_best`.
    if best.value is None or criterion.is_better(value, best.value, 0.0):
        best = replace(best, value=value, step=state.step)
    return replace(state, best=best)


def is_over(config: RunConfig, state: TrainState) -> bool:
    """Return whether a run at `state` has ended: at its last step, stopped early, or ended by a
    callback."""
    num_steps = config.train.total_steps
    is_stopped = state.stopped_steps == num_steps  # more steps continue it
    return state.step >= num_steps or is_stopped or has_stopped(config, state)


def has_stopped(config: RunConfig, state: TrainState) -> bool:
    """Return whether the best metric has not improved for ``early_stopping.patience`` times."""
    stopping = config.evaluation.early_stopping
    return stopping is not None and _comparable(config, state).num_since >= stopping.patience


def _comparable(config: RunConfig, state: TrainState) -> BestSoFar:
    """Return the best so far; empty if the run resumed with another metric."""
    metric = config.evaluation.best.metric
    return state.best if state.best.metric == metric else BestSoFar(metric)
