"""The end of a run: a verified Hugging Face directory and a closing summary."""

from __future__ import annotations

import shutil

import torch.distributed as dist

from bigtrain.engine.build import TrainEngine
from bigtrain.run.export import export_run
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState

EXPORT = "hf"


def finish(session: Session, engine: TrainEngine, state: TrainState) -> None:
    """Export the last checkpoint to ``RUN/hf`` if asked, and sum up. Collective.

    Raises ModelError on every process if the exported model does not answer as the trained one.
    """
    engine.close()
    failure: list[Exception | None] = [None]
    summary = session.metrics.summary() if session.metrics is not None else []
    if session.world.is_main:
        if session.run.config.output.export:
            output = session.directory / EXPORT
            # A run that ended before has left one; it is of an earlier or of the same step.
            shutil.rmtree(output, ignore_errors=True)
            try:
                export_run(session.directory, output, step=state.step)
                summary.append(f"exported to {output}, reloaded and compared: same logits")
            except Exception as error:
                failure = [error]
    # The others wait here while the main process exports, and learn how it went.
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]
    if session.metrics is not None:
        session.metrics.close(summary)
