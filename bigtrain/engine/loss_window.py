"""The mean loss over several optimizer steps, without waiting for the device at each."""

from __future__ import annotations

from bigtrain.engine.train_engine import StepResult, TrainEngine


class LossWindow:
    """Mean loss in nats per target token over the steps since it was last read or emptied.

    Sums stay on the device; a step costs two additions. Steps with a skipped update count only if
    there is no other step.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self.empty()

    def empty(self) -> None:
        """Forget the steps so far: the run has rolled back."""
        self._sum: StepResult | None = None
        self._skipped: StepResult | None = None

    def add(self, result: StepResult, *, updated: bool) -> None:
        """Count a step; `updated`: whether its update was made."""
        if not updated:
            self._skipped = result
        elif self._sum is None:
            self._sum = result  # unchanged: the mean of one step is its own loss, bit for bit
        else:
            loss_sum = self._sum.loss_sum.double() + result.loss_sum.double()
            self._sum = StepResult(loss_sum, self._sum.num_targets + result.num_targets)

    def read(self) -> float:
        """Return the mean and empty the window. Collective; waits for the device."""
        result = self._sum or self._skipped
        assert result is not None
        self.empty()
        return self._engine.step_loss(result)
