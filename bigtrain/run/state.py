"""Where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.data.samples.phases import Phase
from bigtrain.settings.batch_plan import BatchPlan


@dataclass(frozen=True)
class GuardState:
    """What `bigtrain.run.diagnostics.step_guard` decides by.

    num_skipped: steps so far whose update was left out. streak: how many of the last steps were,
    one after the other. losses, norms: of the last steps that were made, oldest first, where spikes
    are looked for. rolled_back_to: the step the run went back to last, and num_rollbacks how often.
    """

    num_skipped: int = 0
    streak: int = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    rolled_back_to: int | None = None
    num_rollbacks: int = 0

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> GuardState:
        """Of what `dataclasses.asdict` gave; None: of a checkpoint that is older than this."""
        tree = tree or {}
        figures = {name: tuple(tree[name]) for name in ("losses", "norms") if name in tree}
        return cls(**{**tree, **figures})


@dataclass(frozen=True)
class TrainState:
    """Optimizer steps done, and the samples and input tokens that are read. All of the state there
    is outside the engine: sample order and random streams are functions of these and the seed.
    Samples only grow, also where a run goes back to an earlier step
    (`bigtrain.run.diagnostics.step_guard`).

    `phases`: of the data, `bigtrain.data.samples.phases`; one for each change of it, oldest first.
    `outer_steps`: those with other sites that are done.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    phases: tuple[Phase, ...] = ()
    guard: GuardState = GuardState()
    outer_steps: int = 0

    def after_step(self, plan: BatchPlan) -> TrainState:
        """The state one optimizer step later."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + plan.global_batch_size,
            tokens=self.tokens + plan.tokens_per_step,
        )
