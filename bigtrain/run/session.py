"""Open resources of a launch on a rank, closed on exit, its check of the data, and its first
writes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bigtrain.engine.startup.process_group import process_group
from bigtrain.engine.startup.runtime import runtime_settings
from bigtrain.errors import DataError
from bigtrain.models.export.base_record import BASE, record_base
from bigtrain.planner.run_prediction import RunPrediction
from bigtrain.run.context import RunContext
from bigtrain.run.health.fencing import RunClaim
from bigtrain.run.health.watchdog import Watchdog
from bigtrain.run.reporting.library_log import library_log
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.run_directory import note_start, write_run_directory
from bigtrain.run.run_log import RunLog
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.state import TrainState
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.files import writing
from bigtrain.system.stop_signals import REQUEUE, StopSignals
from bigtrain.system.world import World

if TYPE_CHECKING:
    from bigtrain.engine.live_teacher import LiveTeacher
    from bigtrain.run.reporting.run_copies import RunCopies


@contextmanager
def open_session(
    run: ResolvedRun, world: World, signals: StopSignals | None = None
) -> Iterator[RunContext]:
    """Join the process group; nothing is written yet. Collective over all ranks. `signals`: the
    handler that the program installed; None installs one."""
    watchdog, logging = run.config.watchdog, run.config.logging
    with (
        warnings.catch_warnings(),
        StopSignals() if signals is None else nullcontext(signals) as stop_signals,
        runtime_settings(run, world) as settings_lines,
        process_group(
            world, watchdog.rendezvous_timeout_seconds, watchdog.collective_timeout_seconds
        ) as joined,
    ):
        # Caused by DeepSpeed's own calls; users cannot avoid them.
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)
        warnings.filterwarnings("ignore", ".*reduce_scatter_tensor", FutureWarning)
        claim = RunClaim(Path(run.config.output.directory))
        log = RunLog(claim, is_main=world.is_main)
        context = RunContext(
            run, world, joined.device, joined.hosts, joined.long_work, stop_signals, claim, log
        )
        with (
            Watchdog(
                watchdog,
                world,
                claim.run_directory,
                context.heartbeat,
                is_stale=claim.is_stale,
                hosts=joined.hosts,
            ),
            library_log(log.to_file, is_shown=logging.deepspeed == "shown"),
        ):
            try:
                for line in settings_lines:
                    log.info(line)
                yield context
            finally:
                log.close()


_NUM_SHOWN_FILES = 10


def verify_data(context: RunContext) -> None:
    """Compare the run's dataset files with their checksums; each rank reads a part. Collective.
    Raises DataError on every rank, listing all corrupt files."""
    from bigtrain.data.shards.verification import ListedShards, rank_slice

    start = time.perf_counter()
    shards = ListedShards(context.config.data)
    shard_numbers = rank_slice(shards.num_bytes.tolist(), context.world.rank, context.world.size)
    problems_by_rank = context.long_work.on_every_rank(
        lambda: [text for number in shard_numbers for text in shards.problems(number)]
    )
    problems = sorted(text for texts in problems_by_rank for text in texts)
    if problems:
        lines = problems[:_NUM_SHOWN_FILES]
        if len(problems) > _NUM_SHOWN_FILES:
            lines.append(f"and {len(problems) - _NUM_SHOWN_FILES} more")
        raise DataError(
            f"{len(problems)} of {shards.num_files} files of the data are corrupt -> restore them, "
            "or remove the dataset and tokenize again:\n" + "\n".join(f"  {text}" for text in lines)
        )
    gigabytes = shards.num_bytes.sum() / 1e9
    context.log.info(
        f"data verified: {shards.num_files} files, {gigabytes:.3g} GB of tokens in "
        f"{time.perf_counter() - start:.1f} s"
    )


def begin_writing(
    context: SegmentContext,
    state: TrainState,
    prediction: RunPrediction | None = None,
    teacher: LiveTeacher | None = None,
) -> RunCopies | None:
    """Record the run in its directory, and open metrics and log at `state`. Collective; called once
    the directory is claimed. Returns the main rank's copies, if checkpoints are copied to an
    address. Raises OutputError on every rank if the directory cannot be written."""
    config, directory, base = context.config, context.directory, context.base
    copies: list[RunCopies] = []  # not the result of `begin`, which is sent to all ranks

    @writing(directory, OUTPUT_REMEDY)
    def begin() -> None:
        """Write the launch's files. Called on the main rank."""
        write_run_directory(
            directory,
            context.run,
            context.inputs,
            hosts=context.hosts,
            device=context.device,
            base_model=None if base is None else base.sums,
            teacher_model=None if teacher is None else teacher.sums,
        )
        if base is not None and config.model.path is not None:
            record_base(config.model.path, base.weights, directory / BASE)
        if prediction is not None:
            prediction.write(directory)
        # The request of the previous launch to the scheduler: it has started this launch.
        (directory / REQUEUE).unlink(missing_ok=True)
        note_start(
            directory,
            generation=context.claim.generation,
            step=state.step,
            samples=state.samples,
            world_size=context.world.size,
        )
        context.log.open(config, state)
        if config.output.copy_to is not None:
            from bigtrain.run.reporting.run_copies import RunCopies

            run_copies = RunCopies(directory, config.output.copy_to)
            copies.append(run_copies)
            # The previous launch may not have finished copying the newest checkpoint.
            step_directories = sorted((directory / "checkpoints").glob("step-????????"))
            if step_directories:
                run_copies.add(step_directories[-1])

    context.long_work.on_main_rank(begin)
    return copies[0] if copies else None
