"""Launch of a run, from checked inputs to its result, one segment after another."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from bigtrain.engine.startup.mesh import open_mesh, warm_up
from bigtrain.errors import DataError
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.initialize import weights_source
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.start_times import GROUPS, IMPORTS, StartTimes
from bigtrain.run.finish import closing_result
from bigtrain.run.outer_steps import refuse_other_run
from bigtrain.run.prediction import log_prediction
from bigtrain.run.reporting.closing import TrainingResult
from bigtrain.run.run_log import RunLog
from bigtrain.run.segment_run import (
    ContinueAt,
    Interrupted,
    Launch,
    Outcome,
    SegmentRun,
)
from bigtrain.run.segments import Segment, segment_at
from bigtrain.run.session import open_session
from bigtrain.run.stream_position import refuse_other_samples
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
    run = replace(first.run, config=first.run.recorded_config)
    source = weights_source(run.config)
    weights = source.find(run.config, first.inputs)
    times = StartTimes()
    times.end(IMPORTS)
    with (
        open_session(run, world, signals) as (context, log),
        ExitStack() as stack,
    ):
        memory = None
        if run.config.checkpoint.memory is not None:
            from bigtrain.run.checkpointing.memory_saver import memory_of_earlier_launch

            memory = stack.enter_context(memory_of_earlier_launch(context, log))
        # Refuse data and settings that cannot be trained before the model is built.
        for line in notes:
            log.to_file(line)
        if run.config.data.verify == "contents":
            verify_data(context, log)
        refuse_other_run(context, first.inputs.data_hash)
        refuse_other_samples(context, first.inputs)
        callbacks = stack.enter_context(Callbacks(context, log, caller_callbacks))
        # The segment with the largest micro-batch needs the most memory.
        largest = max(segments, key=lambda segment: segment.run.plan.micro_batch_tokens)
        prediction = log_prediction(replace(context, run=largest.run), log, largest.inputs)

        # All segments share the process groups.
        mesh = open_mesh(run.topology, world.rank, run.config.watchdog.collective_timeout_seconds)
        context.heartbeat.set_phase("opening the connections of all groups", slow=True)
        warm_up(mesh, context.device)
        times.end(GROUPS)
        launch = Launch(
            context, log, mesh, segments, source, weights, memory, callbacks, prediction, times
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
            outcome = SegmentRun(launch, segment).train()
            if isinstance(outcome, ContinueAt):
                gc.collect()  # the engine of the segment, which hooks and parameters refer to
                if context.device.type == "cuda":
                    torch.cuda.empty_cache()
        received = outcome.signal if isinstance(outcome, Interrupted) else None
        return closing_result(replace(context, run=segment.run), outcome.step, received)


_NUM_SHOWN_FILES = 10


def verify_data(context: RunContext, log: RunLog) -> None:
    """Compare the run's dataset files with their checksums; each rank reads a part. Collective.
    Raises DataError on every rank, listing all corrupt files."""
    from bigtrain.data.shards.verification import ListedShards, rank_slice

    start = time.perf_counter()
    shards = ListedShards(context.config.data)
    share = rank_slice(shards.num_bytes.tolist(), context.world.rank, context.world.size)
    texts_by_rank = context.long_work.on_every_rank(
        lambda: [text for number in share for text in shards.problems(number)]
    )
    corrupt = sorted(text for texts in texts_by_rank for text in texts)
    if corrupt:
        lines = corrupt[:_NUM_SHOWN_FILES]
        if len(corrupt) > _NUM_SHOWN_FILES:
            lines.append(f"and {len(corrupt) - _NUM_SHOWN_FILES} more")
        raise DataError(
            f"{len(corrupt)} of {shards.num_files} files of the data are corrupt -> restore them, "
            "or remove the dataset and tokenize again:\n" + "\n".join(f"  {text}" for text in lines)
        )
    gigabytes = shards.num_bytes.sum() / 1e9
    log.info(
        f"data verified: {shards.num_files} files, {gigabytes:.3g} GB of tokens in "
        f"{time.perf_counter() - start:.1f} s"
    )
