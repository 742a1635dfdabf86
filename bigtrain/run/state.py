"""State of a run outside the engine: steps, samples, data phases, guard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.data.samples.phases import Phase
from bigtrain.settings.batch_plan import BatchPlan


@dataclass(frozen=True)
class GuardState:
    """State of `bigtrain.run.diagnostics.step_guard`.

    num_skipped: skipped updates so far. streak: how many of the last steps in a row were skipped.
    losses, norms: of the last applied updates, oldest first, with ``guard.spike_sigma``.
    rolled_back_to: the step the run last rolled back to, num_rollbacks: how often in a row.
    """

    num_skipped: int = 0
    streak: int = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    rolled_back_to: int | None = None
    num_rollbacks: int = 0

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> GuardState:
        """Build from the output of `dataclasses.asdict`; None: a checkpoint older than the
        guard."""
        tree = tree or {}
        figures = {name: tuple(tree[name]) for name in ("losses", "norms") if name in tree}
        return cls(**{**tree, **figures})


@dataclass(frozen=True)
class BestSoFar:
    """Best evaluation so far, by ``evaluation.best``.

    metric: its name. value: None before the first one. step: its step. reference: the value that an
    evaluation must improve by more than ``early_stopping.min_delta`` (None: `value`). num_since:
    evaluations since then without such an improvement.
    """

    metric: str = ""
    value: float | None = None
    step: int = 0
    num_since: int = 0
    reference: float | None = None

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> BestSoFar:
        """Build from the output of `dataclasses.asdict`; None: a checkpoint older than this
        class."""
        return cls(**(tree or {}))


@dataclass(frozen=True)
class TrainState:
    """Optimizer steps done, samples and input tokens read. This is the complete state outside the
    engine: sample order and random streams are functions of it and the seed. Samples only grow,
    also when a run rolls back to an earlier step (`bigtrain.run.diagnostics.step_guard`).

    `phases`: data phases (`bigtrain.data.samples.phases`), one for each change, oldest first.
    `outer_steps`: outer steps done with other sites. `best`: evaluation. `outer_sent`: the fragment
    of the last outer step that is not yet applied to the masters, and the step after which it was
    sent. `outer_tokens`: tokens that all sites of the outer steps have trained on for the global
    weights.
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

    def after_step(self, plan: BatchPlan) -> TrainState:
        """Return the state one optimizer step later."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + plan.global_batch_size,
            tokens=self.tokens + plan.tokens_per_step,
        )
