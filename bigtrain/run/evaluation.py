"""Loss on the held-out documents."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bigtrain.data.loader import MicroBatch
from bigtrain.engine.build import TrainEngine
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState


class Evaluator:
    """Evaluates on the same held-out samples every time; does nothing where there are none."""

    def __init__(
        self,
        session: Session,
        engine: TrainEngine,
        held_out: Iterable[MicroBatch] | None,
    ) -> None:
        self._session = session
        self._engine = engine
        self._held_out = held_out

    def run(self, state: TrainState) -> float | None:
        """Measure, log and return the held-out loss at `state`, in nats per token. Collective.

        None where there is nothing held out, or the loss is not finite.
        """
        if self._held_out is None:
            return None
        loss, num_tokens = self._engine.evaluate(self._held_out)
        if not math.isfinite(loss):
            return None
        if self._session.metrics is not None:
            self._session.metrics.log_held_out(state.step, loss, num_tokens)
        return loss
