"""The end of a run: a verified Hugging Face directory and a closing summary."""

from __future__ import annotations

from signal import Signals

from bigtrain.engine.build import TrainEngine
from bigtrain.run.export import export_run
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState
from bigtrain.run.stopping import leave_marker

EXPORT = "hf"


def stop_early(session: Session, engine: TrainEngine, state: TrainState, received: Signals) -> None:
    """Leave a run that a signal stopped, after `state` was saved. Collective."""
    engine.close()
    if session.world.is_main:
        session.check_hold()
        leave_marker(session.directory, received, state)
    session.say(
        f"stopped by {received.name} after step {state.step} of {session.run.config.train.steps}; "
        "the same command goes on from there"
    )


def finish(session: Session, engine: TrainEngine, state: TrainState) -> None:
    """Export the last checkpoint to ``RUN/hf`` if asked, and sum up. Collective.

    Raises ModelError on every process if the exported model does not answer as the trained one,
    SupersededError if a later start of the run holds its directory.
    """

    def export() -> list[str]:
        session.check_hold()
        summary = session.metrics.summary() if session.metrics is not None else []
        if session.run.config.output.export:
            output = session.directory / EXPORT
            export_run(session.directory, output, step=state.step, replace=True)
            summary.append(f"exported to {output}, reloaded and compared: same logits")
        return summary

    # All is saved, and the export appears whole or not at all: whoever wants this to end, may.
    session.signals.leave_by(lambda received: _leave_unexported(session, state, received))
    engine.close()
    try:
        summary = session.long_work.on_main_rank(export)
    finally:
        session.signals.listen()
    if session.metrics is not None:
        session.metrics.close(summary)


def _leave_unexported(session: Session, state: TrainState, received: Signals) -> None:
    if not session.superseded():
        leave_marker(session.directory, received, state)
        session.say(
            f"stopped by {received.name} after the last step, saved; the same command exports it"
        )
