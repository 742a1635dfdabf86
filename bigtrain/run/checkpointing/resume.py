"""Resuming a run from its newest complete checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bigtrain.data.samples.phases import Phase, differences, first_phase, next_phase
from bigtrain.engine.checkpoint.snapshot import restore_engine
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.base_fingerprint import refuse_other_base
from bigtrain.run.health import fencing
from bigtrain.run.preflight import Inputs
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.session import Session
from bigtrain.run.state import GuardState, TrainState
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.files import writing

# Settings that may change on resume: none of them changes the mathematics. Everything else must be
# equal.
_FREE = {
    "batch.micro_batch_size",
    "model.attention",
    "model.gradient_checkpointing",
    "model.loss",
    "model.loss_chunk_tokens",
    "model.kernels",
    "model.compile",
    "model.activation_offload",
    # Which tokens, in which proportions, is what the data hash says.
    "data.path",
    "data.sources",
    "data.tokenizer",
    "data.verify",
    "data.workers",
    "sites.address",
    "sites.timeout_seconds",
    "sites.server",
    "sites.token_file",
    "sites.certificate_file",
}
# Settings that older checkpoints lack, with the value that such a run had in effect.
_BEFORE: dict[str, Any] = {
    "model.frozen": [],
    "adapters": None,
    "sites": None,
    "precision.tf32": False,
    "data.document_boundaries": "ignore",
    "data.packing": "concatenate",
    "data.long_documents": "cut",
}
# The same, of runs with sites.
_BEFORE_OF_SITES: dict[str, Any] = {
    "sites.fragments": 1,
    "sites.overlap_steps": 0,
    "sites.mixing": 0.0,
    "sites.shares": None,
}
_PACKING = {"batch.sequence_length", "data.packing", "data.long_documents"}
# Settings that may give the model's tensors other shapes, which no checkpoint can be read into.
_SHAPES = {"model.config", "model.overrides", "model.path"}
_FREE_SECTIONS = {
    "output",
    "logging",
    "checkpoint",
    "evaluation",
    "engine",
    "parallel",
    "profile",
    "watchdog",
    "guard",
}


def restore_or_start(session: Session, engine: TrainEngine) -> TrainState:
    """Resume from the newest complete checkpoint of the run directory, or begin. Collective.

    A corrupt one is passed over with a warning. Raises CheckpointError on every rank if the
    checkpoint belongs to a run with other settings (listing what differs), or if all are corrupt.
    """
    usable = _usable(session)
    while (directory := _next(session, usable)) is not None:
        document = checkpoints.read_state(directory)
        phases = resumed_phases(document, session.run.config, session.inputs, directory)
        if session.run.config.adapters is not None:
            assert session.base_model is not None
            refuse_other_base(document, session.base_model, directory)
        listing = checkpoints.list_tensors(directory)
        tensors = directory / checkpoints.TENSORS
        try:
            restore_engine(engine, tensors, document["engine"], listing)
        except CorruptCheckpointError as error:
            # Raised on all ranks: reading tensors compares their checksums.
            session.say(checkpoints.passed_over(document["step"], str(error)))
            continue
        state = TrainState(
            document["step"],
            document["samples"],
            document["tokens"],
            phases,
            GuardState.from_json(document.get("guard")),
            document.get("outer_steps", 0),
            _pair(document.get("outer_sent")),
        )
        session.say(f"resumed at step {state.step} from {directory}")
        if len(phases) > 1 and phases[-1].first_sample == state.samples:
            changes = "; ".join(f"{key}: {text}" for key, text in differences(*phases[-2:]))
            session.say(f"from sample {state.samples} on with other data: {changes}")
            for text in phases[-1].describe_rests():
                session.say(text)
        return state
    return TrainState(phases=(first_phase(session.run.config, session.inputs.sources),))


def _pair(numbers: list[int] | None) -> tuple[int, int] | None:
    return None if numbers is None else (numbers[0], numbers[1])


def _usable(session: Session) -> Iterator[str]:
    """Checkpoints to try, newest first, on the main rank. Raises CheckpointError if all fail."""
    contents: checkpoints.Contents = (
        "all" if session.run.config.checkpoint.verify == "contents" else "small"
    )
    for directory in checkpoints.usable(session.directory, session.say, contents):
        yield str(directory)
    if checkpoints.steps(session.directory):
        raise CheckpointError(
            f"{session.directory}: every checkpoint is corrupt, so the run cannot resume; fix one, "
            "or remove them all to begin anew"
        )


def _next(session: Session, usable: Iterator[str]) -> Path | None:
    """The next checkpoint to try, or None. Collective.

    Only the main rank looks, so that all ranks resume from the same one.
    """
    found = session.long_work.on_main_rank(lambda: next(usable, None))
    return None if found is None else Path(found)


def resumed_phases(
    document: dict[str, Any], config: RunConfig, inputs: Inputs, directory: Path
) -> tuple[Phase, ...]:
    """The data phases with which a run resumes from a checkpoint; `document`: its ``state.json``.

    One more than in the checkpoint if the data has changed. Raises CheckpointError with every
    changed setting that ``checkpoint.allow_changes`` does not name, and for a change of the data
    that cannot be followed.
    """
    changes = _changed_settings(document["config"], config)
    if "best_fit" in (document["config"]["data"].get("packing"), config.data.packing):
        _refuse_other_packing(changes, directory)
    phases = tuple(Phase.from_json(phase) for phase in document.get("phases", ()))
    if not phases:
        # Older than phases: with other data, it is unknown what was read already.
        if document["data_hash"] != inputs.data_hash:
            text = f"{document['data_hash']!r} there, {inputs.data_hash!r} now"
            _refuse([*changes, ("data", text)], (), directory)
        length = document["config"]["batch"]["sequence_length"]
        phases = (first_phase(config, inputs.sources, length),)
    following = next_phase(phases[-1], config, inputs.sources, document["samples"])
    named = {key for key, _ in changes}
    changes += [change for change in differences(phases[-1], following) if change[0] not in named]
    is_over = config.train.steps <= document["step"]
    _refuse(changes, config.checkpoint.allow_changes, directory, is_over=is_over)
    return phases if following is phases[-1] else (*phases, following)


def _refuse_other_packing(changes: Sequence[tuple[str, str]], directory: Path) -> None:
    packing = [f"  {key}: {text}" for key, text in changes if key in _PACKING]
    if packing:
        raise CheckpointError(
            f"{directory}: other settings pack the documents differently, so that the unread rest "
            "of the epoch is not known; restore the settings, or export the weights and begin a "
            "new run with them:\n" + "\n".join(packing)
        )


def _changed_settings(there: dict[str, Any], config: RunConfig) -> list[tuple[str, str]]:
    before = _BEFORE | (_BEFORE_OF_SITES if there.get("sites") else {}) | _flat(there)
    now = mathematics(config)
    return [
        (key, text)
        for key in sorted(before.keys() | now.keys())
        for text in _differences(before.get(key), now.get(key))
    ]


def _differences(before: Any, now: Any) -> Iterator[str]:
    """What differs: of two dictionaries by key, since one of a model fills a screen."""
    if before == now:
        return
    if not isinstance(before, dict) or not isinstance(now, dict):
        yield f"{before!r} there, {now!r} now"
        return
    for name in sorted(before.keys() | now.keys()):
        there, here = (repr(tree[name]) if name in tree else "absent" for tree in (before, now))
        if there != here:
            yield f"{name}: {there} there, {here} now"


def _refuse(
    changes: Sequence[tuple[str, str]],
    allowed: Sequence[str],
    directory: Path,
    *,
    is_over: bool = False,
) -> None:
    # A section that is allowed stands for its keys.
    refused = [
        (key, text)
        for key, text in changes
        if not any(f"{key}.".startswith(f"{entry}.") for entry in allowed)
    ]
    if refused:
        # With what is allowed already, which must stay: whoever pastes this is not refused again.
        keys = ",".join(sorted({*allowed, *(key for key, _ in refused)}))
        remedy = (
            "or restore the settings (with these train.steps nothing would be left to do; with "
            f"more it could resume by checkpoint.allow_changes=[{keys}])"
            if is_over
            else f"restore the settings, or resume with these by checkpoint.allow_changes=[{keys}]"
        )
        models = ", ".join(sorted({key for key, _ in refused} & _SHAPES))
        if models:
            remedy += f" (of {models} only what leaves every tensor its shape can change)"
        raise CheckpointError(
            f"{directory} belongs to a run with other settings; use another output.directory, "
            f"{remedy}:\n" + "\n".join(f"  {key}: {text}" for key, text in refused)
        )


def mathematics(config: RunConfig) -> dict[str, Any]:
    """The settings that change the mathematics, by name; the batch size in samples."""
    return _flat(config.model_dump(mode="json"))


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, value in config.items():
        if section in _FREE_SECTIONS:
            continue
        for key, item in value.items() if isinstance(value, dict) else [(None, value)]:
            name = f"{section}.{key}" if key else section
            if name not in _FREE:
                flat[name] = item
    tokens = flat.pop("batch.global_tokens", None)
    if tokens is not None:
        flat["batch.global_batch_size"] = tokens // flat["batch.sequence_length"]
    return flat


def acquire_run_directory(session: Session, state: TrainState) -> bool:
    """Fence off any earlier launch that may still write the run directory. Collective.

    Comes after everything that can refuse the run: a refused run fences off nobody. False: an
    earlier launch has saved since `state` was read; read it again, and call this again.
    Raises StaleLaunchError on every rank (`bigtrain.run.health.fencing.acquire`), OutputError
    if the directory cannot be written.
    """

    def acquire() -> tuple[bool, int]:
        is_newest = True
        if session.run_token is None:
            with writing(session.directory, OUTPUT_REMEDY):
                session.run_token = fencing.acquire(session.directory, os.environ)
            # A newer one that was skipped as corrupt is skipped again.
            is_newest = max(checkpoints.steps(session.directory), default=0) <= state.step
        return is_newest, session.run_token.holder.generation

    is_newest, session.generation = session.long_work.on_main_rank(acquire)
    return is_newest
