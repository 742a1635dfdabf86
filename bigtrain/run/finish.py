"""End of a run: a verified Hugging Face directory, a closing summary, and its result."""

from __future__ import annotations

import json
from pathlib import Path
from signal import Signals

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.checkpointing.export import export_run
from bigtrain.run.checkpointing.retention import superfluous
from bigtrain.run.evaluation.evaluator import has_stopped, is_over
from bigtrain.run.health.stopping import leave_marker
from bigtrain.run.reporting.closing import TrainingResult
from bigtrain.run.reporting.metrics_lines import last_lines
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.reporting.run_copies import STOPPED_WAIT_SECONDS
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState
from bigtrain.system.files import writing

EXPORT = "hf"
EXPORTED = "exported.json"
"""File of a run directory that names the step of its ``hf/``. Absent: no export, or unknown."""


def closing_result(
    session: Session, step: int | None, received: Signals | None = None
) -> TrainingResult:
    """Return the result of a launch that ends after `step`, by signal `received` or at the end of
    the run; `step` is None if the run was complete. Collective: the main rank reads the run's
    metrics."""

    def read() -> TrainingResult:
        export = session.directory / EXPORT
        logged, evaluation = last_lines(session.directory / "metrics.jsonl")
        steps = session.run.config.train.steps
        return TrainingResult(
            session.directory,
            logged.get("step", steps) if step is None else step,
            steps,
            None if received is None else received.name,
            export if received is None and export.is_dir() else None,
            logged,
            evaluation,
        )

    return session.long_work.on_main_rank(read)


def stop_early(session: Session, engine: TrainEngine, state: TrainState, received: Signals) -> None:
    """End a run that a signal stopped, after `state` was saved. Collective."""
    engine.close()
    for note in session.copies.wait(STOPPED_WAIT_SECONDS) if session.copies else ():
        session.log(note)
    if session.world.is_main:
        session.check_run_token()
        with writing(session.directory, OUTPUT_REMEDY):
            leave_marker(session.directory, received, state)
    session.log(
        f"stopped by {received.name} after step {state.step} of {session.run.config.train.steps}; "
        "the same command resumes from there"
    )


def is_complete(session: Session, state: TrainState) -> bool:
    """Return whether the run is at its last step (or stopped early), everything is written (export
    included), and checkpoints that it does not keep are removed. Collective.

    Logs it if so.
    """
    config = session.run.config
    if not is_over(config, state):
        return False

    def all_is_written() -> bool:
        directory = session.directory
        if superfluous(directory, state.step, config.checkpoint, config.evaluation.best):
            return False
        return not config.output.export or (
            (directory / EXPORT).is_dir() and _exported_step(directory) == state.step
        )

    complete = session.long_work.on_main_rank(all_is_written)
    if complete:
        early = " and has stopped early" if has_stopped(config, state) else ""
        session.log(
            f"complete: the run is at step {state.step} of {config.train.steps}{early}; nothing to "
            "do"
        )
    return complete


def _exported_step(directory: Path) -> object:
    try:
        record = json.loads((directory / EXPORTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a run from before this record existed, or killed
        return None
    return record.get("step") if isinstance(record, dict) else None


def finish(session: Session, engine: TrainEngine, state: TrainState) -> None:
    """Export the last checkpoint to ``RUN/hf`` if asked, and log the summary. Collective.

    Raises ModelError on every rank if the exported model's logits differ from the trained one's,
    StaleLaunchError if a later launch of the run owns its directory.
    """

    def export() -> list[str]:
        session.check_run_token()
        if session.metrics is not None and session.metrics.failure is not None:
            raise session.metrics.failure
        summary = session.metrics.summary() if session.metrics is not None else []
        if session.metrics is not None and session.prediction is not None:
            summary += session.prediction.beside(*session.metrics.achieved())
        if session.run.config.output.export:
            output = session.directory / EXPORT
            record = session.directory / EXPORTED
            record.unlink(missing_ok=True)
            export_run(
                session.directory, output, step=state.step, replace=True, warn=summary.append
            )
            record.write_text(json.dumps({"step": state.step}) + "\n")
            summary.append(f"exported to {output}, reloaded and compared: same logits")
            if session.copies is not None:
                summary += session.copies.wait(session.run.config.output.copy_wait_seconds)
                session.copies.add(output)
        if session.copies is not None:
            summary += session.copies.wait(session.run.config.output.copy_wait_seconds)
        return summary

    # Everything is saved, and the export is atomic: a signal may end this at once.
    session.signals.exit_after(lambda received: _leave_unexported(session, state, received))
    engine.close()
    try:
        summary = session.long_work.on_main_rank(export)
    finally:
        session.signals.listen()
    if session.metrics is not None:
        session.metrics.close(summary)
        if session.metrics.failure is not None:
            raise session.metrics.failure


def _leave_unexported(session: Session, state: TrainState, received: Signals) -> None:
    if not session.is_stale():
        leave_marker(session.directory, received, state)
        session.log(
            f"stopped by {received.name} after the last step, saved; the same command exports it"
        )
