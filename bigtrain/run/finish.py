"""The end of a run: a verified Hugging Face directory and a closing summary."""

from __future__ import annotations

from signal import Signals

import torch.distributed as dist

from bigtrain.data.directories import writing
from bigtrain.engine.build import TrainEngine
from bigtrain.errors import BigtrainError, ModelError, SupersededError
from bigtrain.run.export import export_run
from bigtrain.run.progress import OUTPUT_REMEDY
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState
from bigtrain.run.stopping import leave_marker

EXPORT = "hf"


def stop_early(session: Session, engine: TrainEngine, state: TrainState, received: Signals) -> None:
    """Leave a run that a signal stopped, after `state` was saved. Collective."""
    engine.close()
    if session.world.is_main:
        session.check_hold()
        with writing(session.directory, OUTPUT_REMEDY):
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
    # All is saved, and the export appears whole or not at all: whoever wants this to end, may.
    session.signals.restore()
    engine.close()
    failure: list[BigtrainError | None] = [None]
    summary = session.metrics.summary() if session.metrics is not None else []
    try:
        session.check_hold()
        if session.metrics is not None and session.metrics.failure is not None:
            raise session.metrics.failure
        if session.world.is_main and session.run.config.output.export:
            output = session.directory / EXPORT
            export_run(session.directory, output, step=state.step, replace=True)
            summary.append(f"exported to {output}, reloaded and compared: same logits")
    except SupersededError as error:
        failure = [error]
        raise
    except Exception as error:
        failure = [error if isinstance(error, BigtrainError) else ModelError(str(error))]
        raise
    finally:
        # The others wait here while the main process exports, and learn how it went.
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]
    if session.metrics is not None:
        session.metrics.close(summary)
        if session.metrics.failure is not None:
            raise session.metrics.failure
