"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bigtrain.data.phases import Phase
from bigtrain.topology import BatchPlan


@dataclass(frozen=True)
class TrainState:
    """Optimizer steps done, and the samples and input tokens they consumed. All of the state there
    is outside the engine: sample order and random streams are functions of these and the seed.

    `phases`: of the data, `bigtrain.data.phases`; one for each change of it, oldest first.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    phases: tuple[Phase, ...] = ()

    def after_step(self, plan: BatchPlan) -> TrainState:
        """The state one optimizer step later."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + plan.global_samples,
            tokens=self.tokens + plan.tokens_per_step,
        )
