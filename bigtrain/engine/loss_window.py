"""The mean loss over several optimizer steps, without waiting for the device at each."""

from __future__ import annotations

from bigtrain.engine.train_engine import StepResult, TrainEngine


class LossWindow:
    """Mean loss in nats per target token over the steps since it was last read or emptied.

    Sums stay on the device; a step costs it two additions. Steps whose update was left out count
    only where there is no other.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self.empty()

    def empty(self) -> None:
        """Forget the steps so far: the run goes on from an earlier one."""
        self._sum: StepResult | None = None
        self._skipped: StepResult | None = None

    def add(self, result: StepResult, *, updated: bool) -> None:
        """Count a step; `updated`: whether its update was made."""
        if not updated:
            self._skipped = result
        elif self._sum is None:
            self._sum = result  # as it is: the mean of one step is its own loss, to the last bit
        else:
            loss_sum = self._sum.loss_sum.double() + result.loss_sum.double()
            self._sum = StepResult(loss_sum, self._sum.num_targets + result.num_targets)

    def read(self) -> float:
        """The mean, and an empty window. Collective; waits for the device."""
        result = self._sum or self._skipped
        assert result is not None
        self.empty()
        return self._engine.step_loss(result)
