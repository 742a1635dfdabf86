"""Rollback to an earlier checkpoint after several bad steps in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigtrain.engine.checkpoint.snapshot import restore_engine
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import CorruptCheckpointError, TrainingError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.session import Session
from bigtrain.run.state import BestSoFar, GuardState, TrainState


def roll_back(session: Session, engine: TrainEngine, state: TrainState) -> TrainState:
    """Restore the engine from the newest checkpoint without a bad step before it. Collective.

    Returns the state to continue from: that checkpoint's step, with the samples after `state`'s. No
    save may be in progress. Raises TrainingError on every rank without such a checkpoint, and
    after ``guard.max_rollbacks`` rollbacks to the same one.
    """
    section = session.run.config.guard
    if session.run.config.sites is not None:
        raise TrainingError(
            f"{state.guard.streak} bad steps in a row (guard.max_consecutive), and a run of "
            "several sites cannot roll back one site only: the others would not -> check the data "
            "and the learning rate of this site; when restarted, it resumes from its newest "
            "checkpoint"
        )
    good = _good_checkpoints(session, state)
    while (checkpoint := _from_main(session, good)) is not None:
        directory, document = Path(checkpoint[0]), checkpoint[1]
        listing = checkpoints.list_tensors(directory)
        tensors = directory / checkpoints.TENSORS
        try:
            restore_engine(engine, tensors, document["engine"], listing)
        except CorruptCheckpointError as error:
            session.say(checkpoints.passed_over(document["step"], str(error)))
            continue
        there = GuardState.from_json(document.get("guard"))
        again = state.guard.rolled_back_to == document["step"]
        guard = replace(
            there,
            num_skipped=state.guard.num_skipped,
            rolled_back_to=document["step"],
            num_rollbacks=state.guard.num_rollbacks + 1 if again else 1,
        )
        if guard.num_rollbacks > section.max_rollbacks:
            raise TrainingError(
                f"steps were bad again after the run rolled back to step {document['step']} "
                f"{section.max_rollbacks} times (guard.max_rollbacks); see the events in "
                f"{session.directory}/metrics.jsonl, then resume with another optimizer.lr or data"
            )
        if session.metrics is not None:
            session.metrics.roll_back(document["step"], state.samples)
            session.metrics.log_event(
                "rolled_back",
                step=state.step,
                first_sample=document["samples"],
                num_samples=state.samples - document["samples"],
                to_step=document["step"],
            )
        session.say(
            f"step {state.step}: {state.guard.streak} bad steps in a row; rolled back to step "
            f"{document['step']}, samples {document['samples']} to {state.samples - 1} skipped"
        )
        best = BestSoFar.from_json(document.get("best"))
        return replace(state, step=document["step"], guard=guard, best=best)
    raise TrainingError(
        f"{state.guard.streak} bad steps in a row (guard.max_consecutive), and {session.directory} "
        "has no checkpoint from before them to roll back to -> check the data and the learning "
        "rate, and save more often (checkpoint.every_steps)"
    )


def _good_checkpoints(
    session: Session, state: TrainState
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for directory in checkpoints.usable(session.directory, session.say):
        document = checkpoints.read_state(directory)
        streak = GuardState.from_json(document.get("guard")).streak
        if document["step"] < state.step and streak == 0:
            yield str(directory), document


def _from_main(
    session: Session, checkpoints: Iterator[tuple[str, Mapping[str, Any]]]
) -> tuple[str, Mapping[str, Any]] | None:
    return session.long_work.on_main_rank(lambda: next(checkpoints, None))
