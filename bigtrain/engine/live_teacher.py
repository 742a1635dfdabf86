"""Teacher of a distillation that is computed in the run: a second model, which is frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.layers.token_loss import TopTokens
from bigtrain.models.weights.checksums import Sums


@dataclass(frozen=True)
class LiveTeacher:
    """A frozen model on the ranks of a run. top: the tokens that it is asked for. sums: checksums
    of the model's files."""

    engine: TrainEngine
    top: TopTokens
    sums: Sums

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Return `batch` with the log-probabilities of the teacher's most probable tokens at each
        target. Collective as `TrainEngine.token_scores`."""
        with self.engine.reference():
            scores = self.engine.token_scores(replace(batch, weights=None), self.top)
        values, ids = scores[..., 1:].split(self.top.count, -1)
        return replace(batch, tokens=None, teacher_values=values, teacher_ids=ids.long())

    def close(self) -> None:
        """Free the model."""
        self.engine.close()
