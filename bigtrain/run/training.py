"""Assembly of a run: what a launch opens, what each segment opens, and how both are closed.

A part of a run is a line below: it is opened with the context of the launch or of the segment, and
closed at the end of the block in reverse order. The loop (`bigtrain.run.loop`) uses the parts.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from signal import Signals

import torch

from bigtrain.engine.startup.mesh import open_mesh, warm_up
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.initialize import weights_source
from bigtrain.run.checkpointing.memory_directory import remove_left_over
from bigtrain.run.checkpointing.resume import Recovery
from bigtrain.run.checkpointing.saver import Saver
from bigtrain.run.diagnostics.start_times import GROUPS, IMPORTS, WEIGHTS, StartTimes
from bigtrain.run.diagnostics.step_clock import PartMemory
from bigtrain.run.finish import closing_result, finish, stop_early
from bigtrain.run.loop import Loop
from bigtrain.run.outer_steps import OuterSteps, refuse_other_run
from bigtrain.run.prediction import log_prediction, utilization_of
from bigtrain.run.run_view import TrainingResult
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.segment_start import (
    Launch,
    Resumed,
    closed_at_end,
    open_engine,
    refuse_other_samples,
    resume,
    with_position,
)
from bigtrain.run.segments import ContinueAt, Finished, Interrupted, Outcome, Segment, segment_at
from bigtrain.run.session import begin_writing, open_session, verify_data
from bigtrain.run.state import TrainState, is_over
from bigtrain.system.stop_signals import StopSignals
from bigtrain.system.world import World


def train_inputs(
    segments: Sequence[Segment],
    world: World,
    signals: StopSignals,
    notes: Sequence[str] = (),
    caller_callbacks: Sequence[object] = (),
) -> TrainingResult:
    """Train a run's `segments` to its end or until a signal, resuming from its directory; return
    its result on every rank. Collective over all ranks of `world`. `notes`: lines for log.txt from
    before. `caller_callbacks`: callbacks of the calling program."""
    first = segments[0]
    # The launch has the settings with the phases; a segment has the batch of a phase.
    run = replace(first.run, config=first.run.recorded_config)
    source = weights_source(run.config)
    weights = source.find(run.config, first.inputs)
    times = StartTimes()
    times.end(IMPORTS)
    with ExitStack() as lifetimes:
        enter = lifetimes.enter_context
        context = enter(open_session(run, world, signals))
        memory = None
        if run.config.checkpoint.memory is not None:
            from bigtrain.run.checkpointing.memory_saver import memory_of_earlier_launch

            memory = enter(memory_of_earlier_launch(context))
        # Refuse data and settings that cannot be trained before the model is built.
        for line in notes:
            context.log.to_file(line)
        if run.config.data.verify == "contents":
            verify_data(context)
        refuse_other_run(context, first.inputs.data_hash)
        refuse_other_samples(context, first.inputs)
        callbacks = enter(Callbacks(context, caller_callbacks))
        # The segment with the largest micro-batch needs the most memory.
        largest_segment = max(segments, key=lambda segment: segment.run.plan.micro_batch_tokens)
        prediction_context = replace(context, run=largest_segment.run)
        prediction = log_prediction(prediction_context, largest_segment.inputs)
        # All segments share the process groups.
        mesh = open_mesh(run.topology, world.rank, run.config.watchdog.collective_timeout_seconds)
        context.heartbeat.set_activity("opening the connections of all groups", slow=True)
        warm_up(mesh, context.device)
        times.end(GROUPS)
        launch = Launch(
            context, mesh, segments, source, weights, memory, callbacks, prediction, times
        )

        # Each segment has a separate engine and resumes from the checkpoint before the segment.
        step = 0
        if len(segments) > 1:
            step = context.long_work.on_main_rank(
                lambda: max(checkpoints.list_steps(context.directory), default=0)
            )
        outcome: Outcome = ContinueAt(step)
        while isinstance(outcome, ContinueAt):
            segment = segment_at(segments, outcome.step)
            outcome = _train_segment(launch, segment)
            if isinstance(outcome, ContinueAt):
                gc.collect()  # the engine of the segment, which hooks and parameters refer to
                if context.device.type == "cuda":
                    torch.cuda.empty_cache()
        received = outcome.signal if isinstance(outcome, Interrupted) else None
        last_context = replace(context, run=segment.run)
        return closing_result(last_context, outcome.step, received)


def _train_segment(launch: Launch, segment: Segment) -> Outcome:
    """Train a segment by one engine from the newest checkpoint, and save and export what is due
    after it. Collective."""
    callbacks, inputs, config = launch.callbacks, segment.inputs, segment.run.config
    with ExitStack() as lifetimes:
        enter = lifetimes.enter_context
        context = enter(open_engine(launch, segment))
        teacher = None
        if inputs.teacher is not None:
            from bigtrain.run.live_teacher import open_teacher

            teacher = enter(open_teacher(context, inputs.teacher))
        # Before weights are restored: the global weights of the sites are restored with them.
        outer = OuterSteps(context)
        resumed = resume(launch, segment, context)
        if not isinstance(resumed, Resumed):
            return resumed
        context, evaluator = resumed.context, resumed.evaluator
        batches = enter(closed_at_end(resumed.batches))

        # The run directory is claimed: join the other sites, and record the launch.
        state = outer.begin(resumed.state)
        enter(closed_at_end(outer))
        start_times, launch.times = launch.times, None
        is_first_segment = start_times is not None  # that this launch trains
        if is_first_segment:
            launch_context = replace(context, run=launch.context.run)
            launch.copies = begin_writing(launch_context, state, launch.prediction, teacher)
        # A reference model scores with the weights as they are now, before any step.
        if config.objective.kind.reads_scores(config):
            from bigtrain.run.reference_scores import ReferenceScores

            ReferenceScores(context).add(state, batches, evaluator)
        if start_times is not None:
            callbacks.start(state)
            start_times.end(WEIGHTS)

        saver = enter(Saver(context, copies=launch.copies, on_complete=callbacks.checkpoint))
        memory_saver = None
        if config.checkpoint.memory is None:
            remove_left_over(context, None)
        else:
            from bigtrain.run.checkpointing.memory_saver import memory_saver_of

            memory_saver = enter(memory_saver_of(context, saver, launch.memory))
        if is_over(config, state):
            # Other sites may have ended the run without this site, or this site has to end it.
            state = outer.make_last(state)
            is_saved = state == resumed.state
            if is_saved:
                saver.finish_retention(state.step)
            else:
                saver.save(state, {})
        recovery = Recovery(context, saver, memory_saver, segment.begin)
        replica_watch = None
        if config.guard.compare_every_steps is not None:
            from bigtrain.run.diagnostics.replica_watch import ReplicaWatch

            replica_watch = ReplicaWatch(context, state, recovery.restore_alike)
        loop = Loop(
            context,
            context.engine,
            batches,
            evaluator,
            saver,
            outer,
            callbacks,
            roll_back=recovery.roll_back,
            memory=PartMemory(context.device.type),
            utilization=utilization_of(context, inputs.hf_config),
            start_times=start_times,
            memory_saver=memory_saver,
            replica_watch=replica_watch,
            with_position=partial(with_position, context, batches),
        )
        state, received = loop.run(state, segment.end)
        saver.wait(must_succeed=True)
        if memory_saver is not None:
            memory_saver.finish()
    return _end_segment(launch, context, state, received, outer)


def _end_segment(
    launch: Launch,
    context: SegmentContext,
    state: TrainState,
    received: Signals | None,
    outer: OuterSteps,
) -> Outcome:
    """End the launch after a signal, or export after the run's last step. Everything is saved, and
    the engine is closed. Collective."""
    if received is not None:
        stop_early(context, state, received=received, copies=launch.copies)
        outcome: Finished | Interrupted = Interrupted(state.step, received)
    elif is_over(context.config, state):
        final = outer.final_record(state)
        finish(context, state, prediction=launch.prediction, copies=launch.copies, outer=final)
        outcome = Finished(state.step)
    else:
        return ContinueAt(state.step)
    launch.callbacks.end(state, received)
    return outcome
