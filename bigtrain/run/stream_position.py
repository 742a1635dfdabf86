"""Position of a stream of samples in a checkpoint, and samples that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigtrain.data.loading.loader import TrainingBatches
from bigtrain.data.samples.items import ItemReader
from bigtrain.data.samples.source import SourceDataset, StreamDataset
from bigtrain.errors import DataError
from bigtrain.run.context import RunContext
from bigtrain.run.preflight import Inputs
from bigtrain.run.state import TrainState
from bigtrain.settings.extensions import location


def refuse_other_samples(context: RunContext, inputs: Inputs) -> None:
    """Compare the items that each rank has read before the run, of samples of user code.
    Collective; raises DataError on every rank if they differ."""
    dataset = inputs.datasets[0]
    if isinstance(dataset, StreamDataset | SourceDataset):
        sums = context.long_work.on_every_rank(lambda: inputs.data_hash)
        items_text = "its first items" if isinstance(dataset, StreamDataset) else "its items"
        _refuse_differences(dataset.train.items, sums, items_text)


def with_position(context: RunContext, batches: TrainingBatches, state: TrainState) -> TrainState:
    """Return `state`, at the end of a step, with the position of a stream of samples. Collective
    for a stream; raises DataError on every rank if ranks have read different items, and the errors
    of the stream."""
    stream = batches.stream
    if stream is None:
        return state
    position = None

    def look() -> str:
        nonlocal position
        position = stream.position_at(state.samples)
        return position.checksum

    sums = context.long_work.on_every_rank(look)
    _refuse_differences(stream.items, sums, f"the items before {state.samples}")
    return replace(state, stream=position)


def _refuse_differences(items: ItemReader, sums: Sequence[str], items_text: str) -> None:
    differing_rank = next((rank for rank, checksum in enumerate(sums) if checksum != sums[0]), None)
    if differing_rank is not None:
        raise DataError(
            f"{items.name}: {items_text} are others on rank {differing_rank} (checksum "
            f"{sums[differing_rank]}) than on rank 0 ({sums[0]}), and every rank must read the "
            f"same samples ({location(items.source_class)}) -> let them depend on "
            "data.samples.settings only, not on rank, host, time or hash()"
        )
