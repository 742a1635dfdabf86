"""Loss on the held-out documents, of each source and of the mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bigtrain.data.loading.loader import HeldOutSource
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.reporting.metrics import HeldOutLoss
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState


class Evaluator:
    """Evaluates on the same held-out samples every time; does nothing if there are none.

    The loss of a mixture is the mean of its sources' losses, weighted by their training weights;
    a source without held-out documents does not count.
    """

    def __init__(
        self, session: Session, engine: TrainEngine, held_out: Sequence[HeldOutSource]
    ) -> None:
        self._session = session
        self._engine = engine
        self._held_out = held_out

    def run(self, state: TrainState) -> float | None:
        """Measure, log and return the held-out loss at `state`, in nats per token. Collective.

        None without held-out documents, or if the loss is not finite.
        """
        if not self._held_out:
            return None
        sources = {
            source.name: HeldOutLoss(*self._engine.evaluate(source.batches))
            for source in self._held_out
        }
        total = sum(source.weight for source in self._held_out)
        loss = sum(sources[one.name].loss * (one.weight / total) for one in self._held_out)
        if not math.isfinite(loss):
            return None
        if self._session.metrics is not None:
            num_tokens = sum(source.tokens for source in sources.values())
            by_source = sources if len(sources) > 1 else {}
            self._session.metrics.log_held_out(state.step, loss, num_tokens, by_source)
        return loss
