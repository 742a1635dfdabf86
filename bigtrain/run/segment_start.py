"""Start of a segment: its engine, the checkpoint that it continues from, and its data."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch.distributed as dist

from bigtrain.data.loading.loader import (
    HeldOutSource,
    TrainingBatches,
    open_held_out,
    open_held_out_sets,
    open_training_data,
)
from bigtrain.data.samples.items import ItemReader
from bigtrain.data.samples.source import SourceDataset, StreamDataset
from bigtrain.data.shards.block_checksums import NOT_VERIFIED
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import DataError, ModelError
from bigtrain.models.equivalence.cache_key import trial_key
from bigtrain.models.equivalence.model_plan import KIND
from bigtrain.models.weights.import_hf import Weights
from bigtrain.planner.run_prediction import RunPrediction
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.checkpointing.initialize import WeightsSource
from bigtrain.run.checkpointing.resume import acquire_run_directory, restore_or_start
from bigtrain.run.checkpointing.saver import refuse_small_disk
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.start_times import MODEL, StartTimes
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.finish import is_complete
from bigtrain.run.preflight import Inputs
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.segments import ContinueAt, Finished, Segment, segment_at
from bigtrain.run.state import TrainState, is_over
from bigtrain.settings.extensions import location
from bigtrain.system.user_cache import cache_get, cache_put

if TYPE_CHECKING:
    from bigtrain.run.checkpointing.memory_files import MemoryFiles
    from bigtrain.run.reporting.run_copies import RunCopies


@dataclass
class Launch:
    """State shared by the segments of a launch. times: until the first step, None after it.
    copies: of checkpoints, on the main rank, once this launch writes the run directory.
    logged_segment: the segment whose plan is in the log. rejected: checkpoints that could not be
    read (`restore_or_start`)."""

    context: RunContext
    mesh: Mesh
    segments: Sequence[Segment]
    source: WeightsSource
    weights: Weights | None
    memory: MemoryFiles | None
    callbacks: Callbacks
    prediction: RunPrediction | None
    times: StartTimes | None
    copies: RunCopies | None = None
    logged_segment: Segment | None = None
    rejected: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True)
class Resumed:
    """State from which a segment is trained, and its data."""

    context: SegmentContext
    state: TrainState
    batches: TrainingBatches
    evaluator: Evaluator


class _Closable(Protocol):
    def close(self) -> None: ...


Closable = TypeVar("Closable", bound=_Closable)


@contextmanager
def closed_at_end(part: Closable) -> Iterator[Closable]:
    """Close `part` at the end of the block; not after an error, when other ranks may be gone that
    closing waits for."""
    yield part
    part.close()


@contextmanager
def open_engine(launch: Launch, segment: Segment) -> Iterator[SegmentContext]:
    """Build the engine of a segment, whose weights are not read yet, and log its plan; yield the
    context of the segment. Closed as by `closed_at_end`. Collective."""
    context, inputs = replace(launch.context, run=segment.run), segment.inputs
    log = context.log
    context.heartbeat.set_activity("building the model", slow=True)
    engine = build(context, inputs, launch.source, launch.mesh)
    if launch.times is not None:
        launch.times.end(MODEL)
        # A segment may be begun several times before its first step: its plan is logged once.
        if launch.logged_segment is not segment:
            launch.logged_segment = segment
            _log_plan(context, inputs, engine)
    if len(launch.segments) > 1:
        log.info(segment.describe())
    with closed_at_end(engine):
        yield SegmentContext(**vars(context), inputs=inputs, engine=engine)


def _log_plan(context: RunContext, inputs: Inputs, engine: TrainEngine) -> None:
    log, settings, topology = context.log, context.run.engine, context.topology
    log.to_file(f"DeepSpeed speed patches: {', '.join(engine.speed_patches) or 'none'}")
    if settings.not_tried:
        log.info(
            f"{settings.source}: not covered by bigtrain's tests: "
            f"{', '.join(settings.not_tried)} (docs/reference/deepspeed_keys.md)"
        )
    for note in settings.notes:
        log.info(note)
    placement_lines = [topology.describe(), *topology.crossings(context.hosts)]
    plan_lines = inputs.model_plan.lines(context.plan.accumulation)
    for line in (*placement_lines, *plan_lines, *inputs.notes):
        if line:
            log.info(line)
    for report in inputs.packing:
        log.info(str(report))
    for dataset in inputs.datasets:
        if not dataset.table.has_blocks:
            log.info(f"{dataset.path}: {NOT_VERIFIED}")


def build(context: RunContext, inputs: Inputs, source: WeightsSource, mesh: Mesh) -> TrainEngine:
    """Build the engine of a run, its weights not read yet. Collective over all ranks. Raises
    ModelError on every rank for a tensor-parallel plan that is not right."""
    run = context.run
    if run.topology.tensor_size > 1:
        _check_tensor_plan(context, inputs, mesh)
    return build_engine(
        source.building(run.config),
        run.engine,
        run.plan,
        inputs.hf_config,
        context.device,
        mesh,
        inputs.model_plan,
    )


def _check_tensor_plan(context: RunContext, inputs: Inputs, mesh: Mesh) -> None:
    """Verify the model's tensor-parallel plan in the main rank's tensor-parallel group, unless the
    cache has a verified plan. Collective; raises ModelError on every rank."""
    from bigtrain.models.equivalence.tensor_parallel import check_tensor_plan

    config, work = context.config, context.long_work
    attention, sequence_length = config.model.attention, config.batch.sequence_length
    size, adapters = context.topology.tensor_size, config.adapters
    adapter_settings = None if adapters is None else adapters.model_dump(mode="json")
    key = trial_key(
        inputs.hf_config, "tensor", size, (attention, sequence_length), adapter_settings
    )
    if key is not None and work.on_main_rank(lambda: cache_get(KIND, key) is not None):
        return
    failure: ModelError | None = None
    if 0 in dist.get_process_group_ranks(mesh.tensor):
        try:
            check_tensor_plan(
                inputs.hf_config,
                attention,
                sequence_length,
                mesh.tensor,
                context.device,
                adapters=adapters,
            )
        except ModelError as error:
            failure = error

    def raise_or_cache() -> None:
        if failure is not None:
            raise failure
        if key is not None:
            cache_put(KIND, key, {"is_right": True})

    work.on_main_rank(raise_or_cache)


def resume(
    launch: Launch, segment: Segment, context: SegmentContext
) -> Resumed | Finished | ContinueAt:
    """Restore the newest checkpoint or initial weights, and acquire the run token. Return
    ContinueAt, for a new engine, if the checkpoint belongs to another segment, or if a corrupt
    checkpoint may have filled parts of this engine; Finished if the run was complete before.
    Collective."""

    def with_initial_weights() -> SegmentContext:
        return replace(context, base=launch.source.fill(context, launch.weights))

    has_adapters = context.config.adapters is not None
    if has_adapters:
        # Checkpoints do not contain the base weights, so these are read first.
        context = with_initial_weights()
    while True:
        state = restore_or_start(context, launch.memory, launch.rejected)
        if state is None:
            return ContinueAt(segment.begin)
        if segment_at(launch.segments, state.step) is not segment:
            return ContinueAt(state.step)
        if is_complete(context, state):
            if launch.memory is not None:
                launch.memory.end()
            return Finished(None)
        if state.step == 0 and not has_adapters:
            context = with_initial_weights()

        if context.config.adapters is not None and context.config.adapters.init == "pissa":
            from bigtrain.engine.principal_adapters import begin_principal_adapters

            assert context.base is not None
            begin_principal_adapters(
                context.engine,
                context.config,
                context.inputs.hf_config,
                context.base.weights,
                is_new=state.step == 0,
                gather=context.long_work.on_every_rank,
            )
        # Everything that can refuse the run comes before any rank writes.
        batches, held_out = _open_data(context, state)
        evaluator = Evaluator(context, held_out)
        if not is_over(context.config, state):
            refuse_small_disk(context)
        # A signal from here on takes effect after the first step.
        context.signals.listen()
        if acquire_run_directory(context, state):
            return Resumed(context, state, batches, evaluator)
        # An earlier launch has saved a newer checkpoint in the meantime: resume from that one.
        batches.close()


def _open_data(
    context: SegmentContext, state: TrainState
) -> tuple[TrainingBatches, Sequence[HeldOutSource]]:
    """Open the data at the position of `state`: training batches and held-out sets."""
    config, plan, inputs = context.config, context.plan, context.inputs
    data_rank, phase = context.engine.mesh.coordinates.data_rank, state.phases[-1]
    is_pinned = context.device.type == "cuda"
    batches = open_training_data(
        config,
        plan,
        data_rank,
        phase,
        state.stream,
        datasets=inputs.datasets,
        device_pin=is_pinned,
    )
    held_out = open_held_out(
        config, plan, data_rank, phase, datasets=inputs.datasets, device_pin=is_pinned
    )
    # Sets count in the mean over all sets only if the data has no held-out documents.
    held_out += open_held_out_sets(
        config,
        plan,
        data_rank,
        inputs.held_out_sets,
        weight=0 if held_out else 1,
        device_pin=is_pinned,
    )
    return batches, held_out


def refuse_other_samples(context: RunContext, inputs: Inputs) -> None:
    """Compare the items of user code that each rank has read before the run. Collective; raises
    DataError on every rank if the items differ between ranks."""
    dataset = inputs.datasets[0]
    if isinstance(dataset, StreamDataset | SourceDataset):
        checksums = context.long_work.on_every_rank(lambda: inputs.data_hash)
        items_text = "its first items" if isinstance(dataset, StreamDataset) else "its items"
        _refuse_differences(dataset.train.items, checksums, items_text)


def with_position(context: RunContext, batches: TrainingBatches, state: TrainState) -> TrainState:
    """Return `state`, at the end of a step, with the position of a stream of samples; `state`
    itself without a stream. Collective for a stream; raises DataError on every rank if ranks have
    read different items, and the errors of the stream."""
    stream = batches.stream
    if stream is None:
        return state
    position = None

    def read_position() -> str:
        nonlocal position
        position = stream.position_at(state.samples)
        return position.checksum

    checksums = context.long_work.on_every_rank(read_position)
    _refuse_differences(stream.items, checksums, f"the items before {state.samples}")
    return replace(state, stream=position)


def _refuse_differences(items: ItemReader, checksums: Sequence[str], items_text: str) -> None:
    """Raise DataError if a rank's checksum of the items differs from rank 0's."""
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise DataError(
                f"{items.name}: {items_text} are others on rank {rank} (checksum "
                f"{checksum}) than on rank 0 ({checksums[0]}), and every rank must read the "
                f"same samples ({location(items.source_class)}) -> let them depend on "
                "data.samples.settings only, not on rank, host, time or hash()"
            )
