"""Launch of a run, from checked inputs to its result: build, resume, train, finish."""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from signal import Signals

import torch
import torch.distributed as dist

from bigtrain.data.loading.loader import (
    TrainingBatches,
    open_held_out,
    open_held_out_sets,
    open_training_data,
)
from bigtrain.data.shards.block_checksums import NOT_VERIFIED
from bigtrain.data.shards.verification import ListedShards, rank_slice
from bigtrain.engine.build import build_engine
from bigtrain.engine.live_teacher import LiveTeacher
from bigtrain.engine.startup.mesh import Mesh, open_mesh, warm_up
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import DataError, ModelError, TrainingError
from bigtrain.models.equivalence.cache_key import trial_key
from bigtrain.models.equivalence.model_plan import KIND
from bigtrain.models.equivalence.tensor_parallel import check_tensor_plan
from bigtrain.models.weights.import_hf import Weights
from bigtrain.planner.run_prediction import RunPrediction
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.initialize import BaseWeights, WeightsSource, weights_source
from bigtrain.run.checkpointing.memory_files import MemoryFiles
from bigtrain.run.checkpointing.memory_saver import (
    MemorySaver,
    memory_of_earlier_launch,
    memory_saver_of,
)
from bigtrain.run.checkpointing.resume import (
    acquire_run_directory,
    restore_alike,
    restore_or_start,
    roll_back,
)
from bigtrain.run.checkpointing.saver import Saver, refuse_small_disk
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.replica_watch import Differing, ReplicaWatch
from bigtrain.run.diagnostics.start_times import GROUPS, IMPORTS, MODEL, WEIGHTS, StartTimes
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.finish import closing_result, finish, is_complete, stop_early
from bigtrain.run.live_teacher import open_teacher
from bigtrain.run.loop import Loop
from bigtrain.run.outer_steps import OuterSteps, refuse_other_run
from bigtrain.run.prediction import log_prediction, utilization_of
from bigtrain.run.preflight import Inputs
from bigtrain.run.reference_scores import ReferenceScores
from bigtrain.run.reporting.closing import TrainingResult
from bigtrain.run.reporting.phase_memory import PhaseMemory
from bigtrain.run.reporting.run_copies import RunCopies
from bigtrain.run.run_log import RunLog
from bigtrain.run.segments import Segment, segment_at
from bigtrain.run.session import begin_writing, open_session
from bigtrain.run.state import TrainState, is_over
from bigtrain.run.stream_position import refuse_other_samples, with_position
from bigtrain.system.stop_signals import StopSignals
from bigtrain.system.user_cache import cache_get, cache_put
from bigtrain.system.world import World


def train_inputs(
    segments: Sequence[Segment],
    world: World,
    signals: StopSignals,
    notes: Sequence[str] = (),
    given: Sequence[object] = (),
) -> TrainingResult:
    """Train a run's `segments` to its end or until a signal, resuming from its directory; return
    its result on every rank. Collective over all ranks of `world`. `notes`: lines for log.txt from
    before. `given`: callbacks of the calling program."""
    first = segments[0]
    run = replace(first.run, config=first.run.recorded_config)
    source = weights_source(run.config)
    weights = source.find(run.config, first.inputs)
    times = StartTimes()
    times.end(IMPORTS)
    with (
        open_session(run, world, signals) as (context, log),
        memory_of_earlier_launch(context, log) as memory,
        ExitStack() as stack,
    ):
        for line in notes:
            log.to_file(line)
        if run.config.data.verify == "contents":
            verify_data(context, log)
        refuse_other_run(context, first.inputs.data_hash)
        refuse_other_samples(context, first.inputs)
        callbacks = stack.enter_context(Callbacks(context, log, given))
        largest = max(segments, key=lambda one: one.run.plan.micro_batch_tokens)
        prediction = log_prediction(replace(context, run=largest.run), log, largest.inputs)
        mesh = open_mesh(run.topology, world.rank, run.config.watchdog.collective_timeout_seconds)
        context.heartbeat.set_phase("opening the connections of all groups", slow=True)
        warm_up(mesh, context.device)
        times.end(GROUPS)
        launch = _Launch(
            context, log, mesh, segments, source, weights, memory, callbacks, prediction, times
        )
        step = 0 if len(segments) == 1 else launch.newest_step()
        while True:
            ended = launch.train(segment_at(segments, step))
            if isinstance(ended, TrainingResult):
                return ended
            step = ended
            gc.collect()  # the engine of the segment, which hooks and parameters refer to
            if context.device.type == "cuda":
                torch.cuda.empty_cache()


@dataclass
class _Launch:
    """State shared by the segments of a launch. times: until the first step, None after it.
    copies: the main rank's, of checkpoints. is_begun: whether this launch writes the run
    directory. logged_plan_of: the segment whose plan is in the log. rejected: checkpoints that
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
    teacher: LiveTeacher | None = None
    is_begun: bool = False
    logged_plan_of: Segment | None = None
    rejected: set[Hashable] = field(default_factory=set)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint on disk, 0 without one. Collective."""
        directory = self.context.directory
        return self.context.long_work.on_main_rank(
            lambda: max(checkpoints.list_steps(directory), default=0)
        )

    def train(self, segment: Segment) -> TrainingResult | int:
        """Train a segment from the newest checkpoint; return the result of the launch, or the step
        with which another engine continues. Collective."""
        context, log, inputs = replace(self.context, run=segment.run), self.log, segment.inputs
        context.heartbeat.set_phase("building the model", slow=True)
        engine = build(context, inputs, self.source, self.mesh)
        if self.times is not None:
            self.times.end(MODEL)
        if not self.is_begun and self.logged_plan_of is not segment:
            patches = ", ".join(engine.speed_patches) or "none"
            log.to_file(f"DeepSpeed speed patches: {patches}")
            _log_plan(context, log, inputs)
            self.logged_plan_of = segment
        if len(self.segments) > 1:
            log.info(segment.describe())
        engine.teach = self.teacher = open_teacher(context, inputs, self.mesh)
        outer = OuterSteps(context, log, inputs.data_hash, engine)
        begun = self._restore(context, engine, segment)
        if begun is None:
            if self.memory is not None:
                self.memory.end()
            self._dismiss_teacher()
            engine.close()
            return closing_result(context, None)
        if isinstance(begun, int):
            self._dismiss_teacher()
            engine.close()
            return begun
        resumed, base, batches, evaluator = begun
        state = outer.begin(resumed)
        if not self.is_begun:
            whole = self.context
            teacher = None if self.teacher is None else self.teacher.sums
            self.copies = begin_writing(whole, log, inputs, state, base, self.prediction, teacher)
        sets = evaluator.held_out
        scored = ReferenceScores(context, log, engine, self.mesh, inputs, base)
        evaluator.held_out = scored.add(state, batches, sets)
        if not self.is_begun:
            self.callbacks.start(state)
        self.is_begun = True
        if self.times is not None:
            self.times.end(WEIGHTS)
        state, received = self._steps(
            context, segment, engine, outer, base, resumed, state, batches, evaluator
        )
        self._dismiss_teacher()
        batches.close()
        outer.close()
        if received is not None:
            stop_early(context, log, engine, state, received, self.copies)
        elif is_over(context.config, state):
            record = outer.final_record()
            finish(context, log, engine, state, self.prediction, self.copies, record)
        else:
            engine.close()
            return state.step
        self.callbacks.end(state, received)
        return closing_result(context, state.step, received)

    def _restore(
        self, context: RunContext, engine: TrainEngine, segment: Segment
    ) -> tuple[TrainState, BaseWeights | None, TrainingBatches, Evaluator] | int | None:
        """Resume or start, with the run token acquired; return None if the run is complete, and a
        step if another engine must continue there: of the segment of the checkpoint, or a new one
        where a corrupt checkpoint may have filled parts of this one. Collective."""
        log, config, plan, inputs = self.log, context.config, context.plan, segment.inputs
        source, weights = self.source, self.weights
        pin = context.device.type == "cuda"
        base: BaseWeights | None = None
        if config.adapters is not None:
            # Checkpoints do not contain the base weights, so these are read first.
            base = source.fill(context, log, engine, inputs, weights)
        while True:
            state = restore_or_start(context, log, engine, inputs, base, self.memory, self.rejected)
            if state is None:
                return segment.begin
            if segment_at(self.segments, state.step) is not segment:
                return state.step
            if is_complete(context, log, state):
                return None
            if state.step == 0 and config.adapters is None:
                base = source.fill(context, log, engine, inputs, weights)
            data = config, plan, self.mesh.coordinates.data_rank, state.phases[-1]
            batches = open_training_data(
                *data, state.stream, datasets=inputs.datasets, device_pin=pin
            )
            held_out = open_held_out(*data, datasets=inputs.datasets, device_pin=pin)
            # They count in the mean over all sets only if the data has no held-out documents.
            weight = 0 if held_out else 1
            held_out += open_held_out_sets(
                *data[:3], inputs.held_out_sets, weight=weight, device_pin=pin
            )
            evaluator = Evaluator(context, log, engine, inputs, held_out)
            if not is_over(config, state):
                refuse_small_disk(context, engine)
            # Before any rank writes; a signal from here on takes effect after the first step.
            context.signals.listen()
            if acquire_run_directory(context, state):
                return state, base, batches, evaluator
            batches.close()

    def _dismiss_teacher(self) -> None:
        if self.teacher is not None:
            self.teacher.close()

    def _steps(
        self,
        context: RunContext,
        segment: Segment,
        engine: TrainEngine,
        outer: OuterSteps,
        base: BaseWeights | None,
        resumed: TrainState,
        state: TrainState,
        batches: TrainingBatches,
        evaluator: Evaluator,
    ) -> tuple[TrainState, Signals | None]:
        """Train the segment's steps; return its state, which has been saved, and the signal."""
        log, inputs = self.log, segment.inputs
        on_complete = self.callbacks.checkpoint
        with (
            Saver(context, log, engine, inputs, base, self.copies, on_complete) as saver,
            memory_saver_of(context, log, engine, saver, self.memory) as memory_saver,
        ):
            if resumed.step < state.step >= context.config.train.total_steps:
                saver.save(state, {})  # other sites have trained to the end without this one
            elif is_over(context.config, state):
                saver.finish_retention(state.step)
            replicas = None
            if context.config.guard.compare_every_steps is not None:
                go_back = partial(
                    _restore_alike, context, log, engine, saver, memory_saver, segment
                )
                replicas = ReplicaWatch(context, engine, state, go_back)
            start_times, self.times = self.times, None
            loop = Loop(
                context,
                log,
                engine,
                batches,
                evaluator,
                saver,
                outer,
                self.callbacks,
                roll_back=partial(_roll_back, context, log, engine, memory_saver, segment),
                memory=PhaseMemory(context.device.type),
                utilization=utilization_of(context, inputs.hf_config),
                start_times=start_times,
                memory_saver=memory_saver,
                replicas=replicas,
                with_position=partial(with_position, context, batches),
            )
            state, received = loop.run(state, segment.end)
            saver.wait(must_succeed=True)
            if memory_saver is not None:
                memory_saver.finish()
        return state, received


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
    config, work = context.config, context.long_work
    settings = config.model.attention, config.batch.sequence_length
    size, adapters = context.topology.tensor_size, config.adapters
    beside = None if adapters is None else adapters.model_dump(mode="json")
    key = trial_key(inputs.hf_config, "tensor", size, settings, beside)
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


def _log_plan(context: RunContext, log: RunLog, inputs: Inputs) -> None:
    topology = context.topology
    engine = context.run.engine
    if engine.not_tried:
        log.info(
            f"{engine.source}: not covered by bigtrain's tests: {', '.join(engine.not_tried)} "
            "(docs/reference/deepspeed_keys.md)"
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


def _roll_back(
    context: RunContext,
    log: RunLog,
    engine: TrainEngine,
    memory_saver: MemorySaver | None,
    segment: Segment,
    state: TrainState,
) -> TrainState:
    """Roll back by a checkpoint on disk; those in memory contain the abandoned steps."""
    rolled_back = _within(segment, roll_back(context, log, engine, state))
    if memory_saver is not None:
        memory_saver.forget()
    return rolled_back


def _restore_alike(
    context: RunContext,
    log: RunLog,
    engine: TrainEngine,
    saver: Saver,
    memory_saver: MemorySaver | None,
    segment: Segment,
    state: TrainState,
    differing: Differing,
) -> TrainState:
    """Return to a checkpoint on disk at which replicas were alike; no save may continue."""
    context.heartbeat.set_phase("rolling back", slow=True)
    saver.wait()
    if memory_saver is not None:
        memory_saver.forget()
    return _within(segment, restore_alike(context, log, engine, state, differing))


def _within(segment: Segment, state: TrainState) -> TrainState:
    """Return `state`. Raises TrainingError if it is of an earlier phase, whose steps this engine
    does not train."""
    if state.step < segment.begin:
        raise TrainingError(
            f"the run has to go back to step {state.step}, and its phase of batch.phases began at "
            f"step {segment.begin} -> save more often (checkpoint.every_steps), check the data and "
            f"the learning rate, and remove the checkpoints after step {state.step} to continue "
            "from there"
        )
    return state


_NAMED = 10


def verify_data(context: RunContext, log: RunLog) -> None:
    """Compare the run's dataset files with their checksums; each rank reads a part. Collective.
    Raises DataError on every rank, listing all corrupt files."""
    begun = time.perf_counter()
    shards = ListedShards(context.config.data)
    share = rank_slice(shards.num_bytes.tolist(), context.world.rank, context.world.size)
    texts_by_rank = context.long_work.on_every_rank(
        lambda: [text for number in share for text in shards[number].problems()]
    )
    corrupt = sorted(text for texts in texts_by_rank for text in texts)
    if corrupt:
        shown = corrupt[:_NAMED]
        if len(corrupt) > _NAMED:
            shown.append(f"and {len(corrupt) - _NAMED} more")
        raise DataError(
            f"{len(corrupt)} of {shards.num_files} files of the data are corrupt -> restore them, "
            "or remove the dataset and tokenize again:\n" + "\n".join(f"  {text}" for text in shown)
        )
    gigabytes = shards.num_bytes.sum() / 1e9
    log.info(
        f"data verified: {shards.num_files} files, {gigabytes:.3g} GB of tokens in "
        f"{time.perf_counter() - begun:.1f} s"
    )
