"""Context of a segment of a run: the launch's, and the engine that trains the segment."""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.weights.checksums import Sums
from bigtrain.models.weights.import_hf import Weights
from bigtrain.run.context import RunContext
from bigtrain.run.preflight import Inputs


@dataclass(frozen=True)
class BaseWeights:
    """Hugging Face weights that this launch has read, and the checksums of the files."""

    weights: Weights
    sums: Sums


@dataclass(frozen=True, kw_only=True)
class SegmentContext(RunContext):
    """Facts of a segment, for the segment's parts. run: with the batch of the segment. base: the
    Hugging Face weights that were read into `engine`, if any."""

    inputs: Inputs
    engine: TrainEngine
    base: BaseWeights | None = None
