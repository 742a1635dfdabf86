"""End of a run: a verified Hugging Face directory, a closing summary, and its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from signal import Signals
from typing import TYPE_CHECKING, Any

from bigtrain.planner.run_prediction import RunPrediction
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.export import export_run
from bigtrain.run.checkpointing.retention import superfluous
from bigtrain.run.context import RunContext
from bigtrain.run.health.stopping import leave_marker
from bigtrain.run.reporting.metrics_lines import last_lines
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.run_view import TrainingResult
from bigtrain.run.state import TrainState, is_over
from bigtrain.system.files import writing
from bigtrain.system.next_commands import next_lines, run_lines

if TYPE_CHECKING:
    from bigtrain.run.reporting.run_copies import RunCopies

STOPPED_WAIT_SECONDS = 20.0
"""Limit for a copy in progress when a signal stops the run: a scheduler waits half a minute."""
EXPORT = "hf"
EXPORTED = "exported.json"
"""File of a run directory that names the step of its ``hf/``, and of one of several sites the outer
step with which the run ended and the sites that made it. Absent: no export, or unknown."""


def closing_result(
    context: RunContext, step: int | None, received: Signals | None = None
) -> TrainingResult:
    """Return the result of a launch that ends after `step` (None: the run was complete), by signal
    `received` or at the end of the run. Collective: the main rank reads the metrics."""

    def read() -> TrainingResult:
        export = context.directory / EXPORT
        is_exported = received is None and export.is_dir()
        last_step, last_evaluation = last_lines(context.directory / "metrics.jsonl")
        total_steps = context.config.train.total_steps
        return TrainingResult(
            context.directory,
            last_step.get("step", total_steps) if step is None else step,
            total_steps,
            None if received is None else received.name,
            export if is_exported else None,
            last_step,
            last_evaluation,
        )

    return context.long_work.on_main_rank(read)


def stop_early(
    context: RunContext,
    state: TrainState,
    *,
    received: Signals,
    copies: RunCopies | None,
) -> None:
    """End a run that a signal stopped, after `state` was saved. Collective."""
    if copies is not None:
        for note in copies.wait(STOPPED_WAIT_SECONDS):
            context.log.info(note)
    if context.world.is_main:
        context.claim.check()
        with writing(context.directory, OUTPUT_REMEDY):
            leave_marker(context.directory, received, state)
    context.log.info(
        f"stopped by {received.name} after step {state.step} of "
        f"{context.config.train.total_steps}; the same command resumes from there"
    )


def is_complete(context: RunContext, state: TrainState) -> bool:
    """Return, and log, whether the run is over, everything is written (export included), and
    superfluous checkpoints are removed. Collective."""
    config = context.config
    if not is_over(config, state):
        return False

    def all_is_written() -> bool:
        directory = context.directory
        if superfluous(directory, state.step, config.checkpoint, config.evaluation.best):
            return False
        if checkpoints.garbage(directory):  # a kill interrupted a removal
            return False
        if not config.output.export:
            return True
        try:
            record = json.loads((directory / EXPORTED).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # no record yet, a partial one, or a run of an older version
            return False
        is_exported = isinstance(record, dict) and record.get("step") == state.step
        return is_exported and (directory / EXPORT).is_dir()

    complete = context.long_work.on_main_rank(all_is_written)
    if complete and context.world.is_main:
        early = " and has stopped early" if state.step < config.train.total_steps else ""
        context.log.info(
            f"complete: the run is at step {state.step} of {config.train.total_steps}{early}; "
            "nothing to do"
        )
        context.log.info(_next_lines(context))
    return complete


def _next_lines(context: RunContext) -> str:
    """Return the commands to type after the run. Reads the export's small files."""
    export = context.directory / EXPORT if context.config.output.export else None
    return next_lines(*run_lines(context.directory, export))


def finish(
    context: RunContext,
    state: TrainState,
    *,
    prediction: RunPrediction | None,
    copies: RunCopies | None,
    outer: Mapping[str, Any],
) -> None:
    """Export the last checkpoint to ``RUN/hf`` if asked, and log the summary. Collective. outer:
    the outer step of a site's weights, for `EXPORTED`. On every rank, raises ModelError if the
    exported model's logits differ, and StaleLaunchError if a newer launch has the directory."""

    def export() -> list[str]:
        context.claim.check()
        log = context.log
        assert log.metrics is not None  # on the main rank
        if log.metrics.failure is not None:
            raise log.metrics.failure
        summary = log.metrics.summary()
        if prediction is not None:
            summary += prediction.beside(*log.metrics.achieved())
        if context.config.output.export:
            output = context.directory / EXPORT
            record = context.directory / EXPORTED
            record.unlink(missing_ok=True)
            export_run(
                context.directory, output, step=state.step, replace=True, warn=summary.append
            )
            record.write_text(json.dumps({"step": state.step, **outer}) + "\n")
            summary.append(f"exported to {output}, reloaded and compared: same logits")
            # A newer item replaces one that waits: the last checkpoint is copied first.
            if copies is not None:
                summary += copies.wait(context.config.output.copy_wait_seconds)
                copies.add(output)
        if copies is not None:
            summary += copies.wait(context.config.output.copy_wait_seconds)
        return [*summary, _next_lines(context)]

    def leave_unexported(received: Signals) -> None:
        if not context.claim.is_stale():
            leave_marker(context.directory, received, state)
            context.log.info(
                f"stopped by {received.name} after the last step, saved; the same command exports "
                "it"
            )

    # A signal may end the export at once: everything is saved, and the next launch exports.
    context.signals.exit_after(leave_unexported)
    try:
        summary = context.long_work.on_main_rank(export)
    finally:
        context.signals.listen()
    metrics = context.log.metrics
    if metrics is not None:
        metrics.close(summary)
        if metrics.failure is not None:
            raise metrics.failure
