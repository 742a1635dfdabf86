"""Position of a stream of samples in a checkpoint, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigtrain.data.loading.loader import TrainingBatches
from bigtrain.data.samples.source import StreamDataset
from bigtrain.errors import DataError
from bigtrain.run.context import RunContext
from bigtrain.run.preflight import Inputs
from bigtrain.run.state import TrainState


def refuse_other_streams(context: RunContext, inputs: Inputs) -> None:
    """Compare the first items of a stream of samples among ranks. Collective; raises DataError on
    every rank if they differ."""
    if isinstance(inputs.datasets[0], StreamDataset):
        sums = context.long_work.on_every_rank(lambda: inputs.data_hash)
        _refuse_differences(context, sums, "its first items")


def with_position(context: RunContext, batches: TrainingBatches, state: TrainState) -> TrainState:
    """Return `state`, at the end of a step, with the position of a stream of samples. Collective
    for a stream; raises DataError on every rank if ranks have read other items of it, and the
    errors of the stream."""
    if not batches.reads_stream:
        return state
    position = None

    def look() -> str:
        nonlocal position
        position = batches.position_at(state.samples)
        return position.checksum

    sums = context.long_work.on_every_rank(look)
    _refuse_differences(context, sums, f"the items before {state.samples}")
    return replace(state, stream=position)


def _refuse_differences(context: RunContext, sums: Sequence[str], what: str) -> None:
    other = next((rank for rank, own in enumerate(sums) if own != sums[0]), None)
    samples = context.config.data.samples
    if other is not None and samples is not None:
        raise DataError(
            f"data.samples.type = {samples.type!r}: {what} are others on rank {other} (checksum "
            f"{sums[other]}) than on rank 0 ({sums[0]}), and every rank must read the same stream "
            "-> let it depend on data.samples.settings only, not on rank, host, time or hash()"
        )
