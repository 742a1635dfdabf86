"""Training of a segment of a run by one engine: build, resume, train, finish."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING

import torch.distributed as dist

from bigtrain.data.loading.loader import (
    TrainingBatches,
    open_held_out,
    open_held_out_sets,
    open_training_data,
)
from bigtrain.data.shards.block_checksums import NOT_VERIFIED
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import ModelError, TrainingError
from bigtrain.models.equivalence.cache_key import trial_key
from bigtrain.models.equivalence.model_plan import KIND
from bigtrain.models.weights.import_hf import Weights
from bigtrain.planner.run_prediction import RunPrediction
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.checkpointing.initialize import BaseWeights, WeightsSource
from bigtrain.run.checkpointing.memory_directory import remove_left_over
from bigtrain.run.checkpointing.resume import (
    acquire_run_directory,
    restore_alike,
    restore_or_start,
    roll_back,
)
from bigtrain.run.checkpointing.saver import Saver, refuse_small_disk
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.start_times import MODEL, WEIGHTS, StartTimes
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.finish import finish, is_complete, stop_early
from bigtrain.run.loop import Loop
from bigtrain.run.outer_steps import OuterSteps
from bigtrain.run.prediction import utilization_of
from bigtrain.run.preflight import Inputs
from bigtrain.run.reporting.phase_memory import PhaseMemory
from bigtrain.run.run_log import RunLog
from bigtrain.run.segments import Segment, segment_at
from bigtrain.run.session import begin_writing
from bigtrain.run.state import TrainState, is_over
from bigtrain.run.stream_position import with_position
from bigtrain.system.user_cache import cache_get, cache_put

if TYPE_CHECKING:
    from bigtrain.engine.live_teacher import LiveTeacher
    from bigtrain.run.checkpointing.memory_files import MemoryFiles
    from bigtrain.run.checkpointing.memory_saver import MemorySaver
    from bigtrain.run.diagnostics.replica_watch import Differing
    from bigtrain.run.reporting.run_copies import RunCopies


@dataclass(frozen=True)
class Finished:
    """The run is at its end after `step`; None: it was complete before this launch."""

    step: int | None


@dataclass(frozen=True)
class Interrupted:
    """A signal has stopped the run after `step`."""

    step: int
    signal: Signals


@dataclass(frozen=True)
class ContinueAt:
    """Another engine has to continue the run after `step`."""

    step: int


Outcome = Finished | Interrupted | ContinueAt


@dataclass
class Launch:
    """State shared by the segments of a launch. times: until the first step, None after it.
    copies: of checkpoints, on the main rank. is_writing: whether this launch writes the run
    directory. logged_segment: the segment whose plan is in the log. rejected: checkpoints that
    could not be read (`restore_or_start`)."""

    context: RunContext
    log: RunLog
    mesh: Mesh
    segments: Sequence[Segment]
    source: WeightsSource
    weights: Weights | None
    memory: MemoryFiles | None
    callbacks: Callbacks
    prediction: RunPrediction | None
    times: StartTimes | None
    copies: RunCopies | None = None
    is_writing: bool = False
    logged_segment: Segment | None = None
    rejected: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True)
class _Resumed:
    """State from which a segment is trained, its data, and the Hugging Face weights that were
    read."""

    state: TrainState
    base: BaseWeights | None
    batches: TrainingBatches
    evaluator: Evaluator


class SegmentRun:
    """Training of a segment of a run by one engine. All methods are collective."""

    def __init__(self, launch: Launch, segment: Segment) -> None:
        """Build the engine, whose weights are not read yet."""
        self._launch, self._segment = launch, segment
        self._context = context = replace(launch.context, run=segment.run)
        log, inputs = launch.log, segment.inputs
        context.heartbeat.set_phase("building the model", slow=True)
        self._engine = build(context, inputs, launch.source, launch.mesh)
        if launch.times is not None:
            launch.times.end(MODEL)
        if not launch.is_writing and launch.logged_segment is not segment:
            patches = ", ".join(self._engine.speed_patches) or "none"
            log.to_file(f"DeepSpeed speed patches: {patches}")
            settings, topology = context.run.engine, context.topology
            if settings.not_tried:
                log.info(
                    f"{settings.source}: not covered by bigtrain's tests: "
                    f"{', '.join(settings.not_tried)} (docs/reference/deepspeed_keys.md)"
                )
            placement = [topology.describe(), *topology.crossings(context.hosts)]
            plan = inputs.model_plan.lines(context.plan.accumulation)
            for line in (*placement, *plan, *inputs.notes):
                if line:
                    log.info(line)
            for report in inputs.packing:
                log.info(str(report))
            for dataset in inputs.datasets:
                if not dataset.table.has_blocks:
                    log.info(f"{dataset.path}: {NOT_VERIFIED}")
            launch.logged_segment = segment
        if len(launch.segments) > 1:
            log.info(segment.describe())
        self._teacher: LiveTeacher | None = None
        if inputs.teacher is not None:
            from bigtrain.run.live_teacher import open_teacher

            self._engine.teach = self._teacher = open_teacher(context, inputs.teacher, launch.mesh)
        # Before anything is restored: checkpoints contain the global weights, too.
        self._outer = OuterSteps(context, log, inputs.data_hash, self._engine)

    def train(self) -> Outcome:
        """Train the segment from the newest checkpoint, and save and export what is due after
        it."""
        launch, context, engine = self._launch, self._context, self._engine
        log, inputs = launch.log, self._segment.inputs
        resumed = self._resume()
        if not isinstance(resumed, _Resumed):
            if isinstance(resumed, Finished) and launch.memory is not None:
                launch.memory.end()
            self._close_teacher()
            engine.close()
            return resumed

        # The run directory is claimed: join the other sites, and record the launch.
        state = self._outer.begin(resumed.state)
        is_first = not launch.is_writing
        if is_first:
            launch.copies = begin_writing(
                launch.context,
                log,
                inputs,
                state,
                base=resumed.base,
                prediction=launch.prediction,
                teacher=None if self._teacher is None else self._teacher.sums,
            )
        # A reference model scores with the weights as they are now, before any step.
        if context.config.objective.kind.reads_scores(context.config):
            from bigtrain.run.reference_scores import ReferenceScores

            scores = ReferenceScores(context, log, engine, launch.mesh, inputs, resumed.base)
            evaluator = resumed.evaluator
            evaluator.held_out = scores.add(state, resumed.batches, evaluator.held_out)
        if is_first:
            launch.callbacks.start(state)
        launch.is_writing = True
        if launch.times is not None:
            launch.times.end(WEIGHTS)

        state, received = self._train_steps(resumed, state)
        self._close_teacher()
        resumed.batches.close()
        self._outer.close()
        if received is not None:
            stop_early(context, log, engine, state, received=received, copies=launch.copies)
            outcome: Finished | Interrupted = Interrupted(state.step, received)
        elif is_over(context.config, state):
            finish(
                context,
                log,
                engine,
                state,
                prediction=launch.prediction,
                copies=launch.copies,
                outer=self._outer.final_record(state),
            )
            outcome = Finished(state.step)
        else:
            engine.close()
            return ContinueAt(state.step)
        launch.callbacks.end(state, received)
        return outcome

    def _resume(self) -> _Resumed | Finished | ContinueAt:
        """Resume or start, with the run token acquired. Another engine must continue if the
        checkpoint is of another segment, and if a corrupt checkpoint may have filled parts of this
        engine."""
        launch, context, engine = self._launch, self._context, self._engine
        log, inputs, mesh = launch.log, self._segment.inputs, launch.mesh
        config, plan = context.config, context.plan
        is_pinned = context.device.type == "cuda"
        base: BaseWeights | None = None
        if config.adapters is not None:
            # Checkpoints do not contain the base weights, so these are read first.
            base = launch.source.fill(context, log, engine, inputs, weights=launch.weights)
        while True:
            state = restore_or_start(
                context, log, engine, inputs, base, memory=launch.memory, rejected=launch.rejected
            )
            if state is None:
                return ContinueAt(self._segment.begin)
            if segment_at(launch.segments, state.step) is not self._segment:
                return ContinueAt(state.step)
            if is_complete(context, log, state):
                return Finished(None)
            if state.step == 0 and config.adapters is None:
                base = launch.source.fill(context, log, engine, inputs, weights=launch.weights)

            # Open the data at the position of the state.
            data_rank, phase = mesh.coordinates.data_rank, state.phases[-1]
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
            evaluator = Evaluator(context, log, engine, inputs, held_out)
            if not is_over(config, state):
                refuse_small_disk(context, engine)

            # Before any rank writes; a signal from here on takes effect after the first step.
            context.signals.listen()
            if acquire_run_directory(context, state):
                return _Resumed(state, base, batches, evaluator)
            batches.close()

    def _train_steps(
        self, resumed: _Resumed, state: TrainState
    ) -> tuple[TrainState, Signals | None]:
        """Train the segment's steps from `state`, where the other sites are; return the last state,
        which has been saved, and the signal."""
        launch, context, engine = self._launch, self._context, self._engine
        log, inputs, batches = launch.log, self._segment.inputs, resumed.batches
        with (
            Saver(
                context,
                log,
                engine,
                inputs,
                base=resumed.base,
                copies=launch.copies,
                on_complete=launch.callbacks.checkpoint,
            ) as saver,
            self._open_memory_saver(saver) as memory_saver,
        ):
            if is_over(context.config, state):
                # Other sites may have ended the run without this one, or this one has to.
                state = self._outer.make_last(state)
                if state == resumed.state:
                    saver.finish_retention(state.step)
                else:
                    saver.save(state, {})

            def roll_back_steps(bad_state: TrainState) -> TrainState:
                restored = self._refuse_earlier_phase(roll_back(context, log, engine, bad_state))
                if memory_saver is not None:
                    memory_saver.forget()  # checkpoints in memory contain the abandoned steps
                return restored

            def restore_equal_replicas(state: TrainState, differing: Differing) -> TrainState:
                context.heartbeat.set_phase("rolling back", slow=True)
                saver.wait()  # no save may continue while checkpoints are removed
                if memory_saver is not None:
                    memory_saver.forget()
                return self._refuse_earlier_phase(
                    restore_alike(context, log, engine, state, differing)
                )

            replicas = None
            if context.config.guard.compare_every_steps is not None:
                from bigtrain.run.diagnostics.replica_watch import ReplicaWatch

                replicas = ReplicaWatch(context, engine, state, restore_equal_replicas)
            start_times, launch.times = launch.times, None
            loop = Loop(
                context,
                log,
                engine,
                batches,
                resumed.evaluator,
                saver,
                self._outer,
                launch.callbacks,
                roll_back=roll_back_steps,
                memory=PhaseMemory(context.device.type),
                utilization=utilization_of(context, inputs.hf_config),
                start_times=start_times,
                memory_saver=memory_saver,
                replicas=replicas,
                with_position=partial(with_position, context, batches),
            )
            state, received = loop.run(state, self._segment.end)
            saver.wait(must_succeed=True)
            if memory_saver is not None:
                memory_saver.finish()
        return state, received

    def _open_memory_saver(self, saver: Saver) -> AbstractContextManager[MemorySaver | None]:
        """Return the saver of checkpoints in memory, if the run has some; a run without them
        removes what earlier runs left on the hosts."""
        launch, context = self._launch, self._context
        if context.config.checkpoint.memory is None:
            remove_left_over(context, launch.log, None)
            return nullcontext()
        from bigtrain.run.checkpointing.memory_saver import memory_saver_of

        return memory_saver_of(context, launch.log, self._engine, saver, launch.memory)

    def _refuse_earlier_phase(self, state: TrainState) -> TrainState:
        """Return `state`. Raises TrainingError if it is of an earlier phase, whose steps this
        engine does not train."""
        begin = self._segment.begin
        if state.step < begin:
            raise TrainingError(
                f"the run has to go back to step {state.step}, and its phase of batch.phases began "
                f"at step {begin} -> save more often (checkpoint.every_steps), check the data and "
                f"the learning rate, and remove the checkpoints after step {state.step} to "
                "continue from there"
            )
        return state

    def _close_teacher(self) -> None:
        if self._teacher is not None:
            self._teacher.close()


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
    """Verify the model's tensor-parallel plan in the main rank's tensor-parallel group, unless that
    is cached. Collective; raises ModelError on every rank."""
    from bigtrain.models.equivalence.tensor_parallel import check_tensor_plan

    config, work = context.config, context.long_work
    settings = config.model.attention, config.batch.sequence_length
    size, adapters = context.topology.tensor_size, config.adapters
    adapter_settings = None if adapters is None else adapters.model_dump(mode="json")
    key = trial_key(inputs.hf_config, "tensor", size, settings, adapter_settings)
    if key is not None and work.on_main_rank(lambda: cache_get(KIND, key) is not None):
        return
    failure: ModelError | None = None
    if 0 in dist.get_process_group_ranks(mesh.tensor):
        try:
            check_tensor_plan(
                inputs.hf_config, *settings, mesh.tensor, context.device, adapters=adapters
            )
        except ModelError as error:
            failure = error

    def decide() -> None:
        if failure is not None:
            raise failure
        if key is not None:
            cache_put(KIND, key, {"is_right": True})

    work.on_main_rank(decide)
