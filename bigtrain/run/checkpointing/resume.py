"""Resume of a run from its newest complete checkpoint, and rollback after several bad steps."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.data.samples.phases import Phase, differences, first_phase
from bigtrain.data.samples.sample_stream import StreamPosition
from bigtrain.engine.checkpoint.snapshot import restore_engine
from bigtrain.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FaultyHostError,
    TrainingError,
)
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.changed_settings import (
    changed_averages,
    changed_rate,
    refuse_other_base,
    resumed_phases,
)
from bigtrain.run.checkpointing.memory_directory import MemoryCheckpoint
from bigtrain.run.checkpointing.saver import Saver
from bigtrain.run.context import RunContext
from bigtrain.run.health import fencing
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.state import BestSoFar, GuardState, TrainState
from bigtrain.system.files import writing

if TYPE_CHECKING:
    from bigtrain.run.checkpointing.memory_files import MemoryFiles
    from bigtrain.run.checkpointing.memory_saver import MemorySaver
    from bigtrain.run.diagnostics.replica_watch import Differing

_Loadable = tuple[Path, dict[str, Any]]
"""Directory of a checkpoint and its ``state.json``."""

_Candidate = _Loadable | MemoryCheckpoint


def restore_or_start(
    context: SegmentContext, memory: MemoryFiles | None, rejected: set[Hashable]
) -> TrainState | None:
    """Resume from the newest complete checkpoint of the run directory or of `memory`, or start.
    Collective. If a checkpoint turns out to be corrupt when it is read, parts of the engine may be
    filled: add the checkpoint to `rejected` with a warning and return None; call again with a new
    engine and this `rejected`. Raises CheckpointError on every rank if a checkpoint belongs to a
    run with other settings (listing the differences), or if all are corrupt."""
    memory_checkpoints = [] if memory is None else memory.complete()
    # Only the main rank reads the directory, so that all ranks load the same checkpoint.
    candidates = (
        candidate
        for candidate in _newest_first(context, memory_checkpoints)
        if _identity(candidate) not in rejected
    )
    while (candidate := context.long_work.on_main_rank(lambda: next(candidates, None))) is not None:
        loadable = _loadable(context, candidate, memory)
        if loadable is None:
            _reject(context, candidate, rejected)
            return None
        directory, document = loadable

        # Refuse a checkpoint of another run before any tensor is read.
        config, inputs = context.run.recorded_config, context.inputs
        parameters = inputs.model_plan.parameters
        phases = resumed_phases(document, config, inputs.sources, directory, parameters)
        if context.config.adapters is not None:
            assert context.base is not None
            refuse_other_base(document, context.base.sums, directory)
        if not _is_restored(context, directory, document):
            _reject(context, candidate, rejected)
            return None

        # Log what continues differently.
        state = _state_of(document, phases)
        context.log.info(f"resumed at step {state.step} from {directory}")
        if memory is not None:
            memory.resumed_step = state.step if isinstance(candidate, MemoryCheckpoint) else None
        for line in (changed_rate(document, config), changed_averages(document, config)):
            if line is not None:
                context.log.info(line)
        begins_data_phase = len(phases) > 1 and phases[-1].first_sample == state.samples
        if begins_data_phase:
            changes = "; ".join(f"{key}: {text}" for key, text in differences(*phases[-2:]))
            context.log.info(f"other data from sample {state.samples} on: {changes}")
            for text in phases[-1].describe_rests():
                context.log.info(text)
        return state
    return TrainState(phases=(first_phase(context.config, context.inputs.sources),))


def _identity(candidate: _Candidate) -> Hashable:
    """Return a key of a checkpoint, which changes if the checkpoint is written again."""
    if isinstance(candidate, MemoryCheckpoint):
        return candidate
    directory, _ = candidate
    return directory, checkpoints.manifest_digest(directory)


def _reject(context: RunContext, candidate: _Candidate, rejected: set[Hashable]) -> None:
    """Add `candidate` to the main rank's `rejected`, so that no later search returns it."""
    if context.world.is_main:
        rejected.add(_identity(candidate))
    context.log.info(
        "building the engine again, parts of which may have been read from that checkpoint"
    )


def _state_of(document: Mapping[str, Any], phases: tuple[Phase, ...]) -> TrainState:
    """Return the state in the ``state.json`` `document`, whose missing fields have defaults: older
    releases did not write them."""
    outer_sent = None
    if document.get("outer_sent"):
        fragment, sent_step = document["outer_sent"]
        outer_sent = fragment, sent_step
    return TrainState(
        step=document["step"],
        samples=document["samples"],
        tokens=document["tokens"],
        phases=phases,
        guard=GuardState.from_json(document.get("guard")),
        outer_steps=document.get("outer_steps", 0),
        best=BestSoFar.from_json(document.get("best")),
        outer_sent=outer_sent,
        outer_tokens=document.get("outer_tokens", 0),
        outer_ended=document.get("outer_ended", 0),
        outer_sites=tuple(document.get("outer_sites", ())),
        stopped_steps=document.get("stopped_steps", 0),
        stream=StreamPosition.from_json(document.get("stream")),
    )


def _newest_first(
    context: RunContext, memory_checkpoints: Sequence[MemoryCheckpoint]
) -> Iterator[_Candidate]:
    """Yield checkpoints on disk and `memory_checkpoints`, both newest first, on the main rank; for
    the same step first the checkpoint in memory. Raises CheckpointError if all fail and
    some are on disk."""
    newest_on_disk = max(checkpoints.list_steps(context.directory), default=0)
    # First checkpoints in memory that are not older than the disk's, which is not read for them.
    yield from (memory for memory in memory_checkpoints if memory.step >= newest_on_disk)
    older = [memory for memory in memory_checkpoints if memory.step < newest_on_disk]
    for directory, document in _usable_on_disk(context):
        while older and older[0].step >= document["step"]:
            yield older.pop(0)
        yield directory, document
    yield from older
    if newest_on_disk:
        raise CheckpointError(
            f"{context.directory}: every checkpoint is corrupt, so the run cannot resume; fix one, "
            "or delete them all to start over"
        )


def _loadable(
    context: SegmentContext, candidate: _Candidate, memory: MemoryFiles | None
) -> _Loadable | None:
    """Return the directory and the state of a checkpoint on this host. For a checkpoint in memory,
    first get the files that this host's ranks need from other hosts; log and return None if a host
    cannot get them. Collective."""
    if not isinstance(candidate, MemoryCheckpoint):
        return candidate
    assert memory is not None
    try:
        directory = memory.prepare(candidate, context.engine)
    except CheckpointError as error:
        context.log.info(f"skipping the checkpoint of step {candidate.step} in memory: {error}")
        return None
    return directory, checkpoints.read_state(directory)


def _is_restored(context: SegmentContext, directory: Path, document: Mapping[str, Any]) -> bool:
    """Restore the engine from a checkpoint; log and return False if it is corrupt. Collective."""
    listing = checkpoints.list_tensors(directory)
    try:
        restore_engine(context.engine, directory / checkpoints.TENSORS, document["engine"], listing)
    except CorruptCheckpointError as error:
        # Raised on all ranks: reading tensors compares their checksums.
        context.log.info(checkpoints.skipped_message(document["step"], str(error)))
        return False
    return True


def _restore_newest(
    context: SegmentContext, candidates: Iterator[_Loadable]
) -> dict[str, Any] | None:
    """Restore the engine from the first of the main rank's `candidates` that is not corrupt; return
    its ``state.json``, or None without one. Collective."""
    # Only the main rank reads the directory, so that all ranks load the same checkpoint.
    while (loadable := context.long_work.on_main_rank(lambda: next(candidates, None))) is not None:
        directory, document = loadable
        if _is_restored(context, directory, document):
            return document
    return None


def _usable_on_disk(context: RunContext) -> Iterator[_Loadable]:
    """Yield checkpoints on disk to load, newest first, on the main rank."""
    contents: checkpoints.Contents = (
        "all" if context.config.checkpoint.verify == "contents" else "small"
    )
    for directory in checkpoints.usable(context.directory, context.log.info, contents):
        yield directory, checkpoints.read_state(directory)


def acquire_run_directory(context: RunContext, state: TrainState) -> bool:
    """Fence off any earlier launch that may still write the run directory. Collective; called after
    all checks that can refuse the run. Return False if an earlier launch has saved since `state`
    was read: read it again, and call this again. Raises StaleLaunchError on every rank
    (`bigtrain.run.health.fencing.acquire`), OutputError if the directory cannot be written."""

    claim = context.claim

    def acquire() -> tuple[bool, int]:
        is_newest = True
        if claim.token is None:
            with writing(context.directory, OUTPUT_REMEDY):
                claim.token = fencing.acquire(context.directory, os.environ)
            # Also False for a newer, corrupt checkpoint: it is then skipped again.
            is_newest = max(checkpoints.list_steps(context.directory), default=0) <= state.step
        return is_newest, claim.token.holder.generation

    is_newest, claim.generation = context.long_work.on_main_rank(acquire)
    return is_newest


@dataclass(frozen=True)
class Recovery:
    """Rollback to a checkpoint, while a segment is trained that began after step `begin`."""

    context: SegmentContext
    saver: Saver
    memory_saver: MemorySaver | None
    begin: int

    def roll_back(self, state: TrainState) -> TrainState:
        """Restore the engine from the newest checkpoint without a bad step before it. Collective;
        no save may be in progress. Returns `state` at the step of that checkpoint: the data
        continues after `state.samples`, so that the samples since are skipped. Raises TrainingError
        on every rank if there is no good checkpoint, and after ``guard.max_rollbacks`` rollbacks to
        one checkpoint."""
        context, section = self.context, self.context.config.guard
        if context.config.sites is not None:
            raise TrainingError(
                f"{state.guard.streak} bad steps in a row (guard.max_consecutive), and a run of "
                "several sites cannot roll back one site only: the others would not -> check the "
                "data and the learning rate of this site; when restarted, it resumes from its "
                "newest checkpoint"
            )

        def good_checkpoints() -> Iterator[_Loadable]:
            for directory in checkpoints.usable(context.directory, context.log.info):
                document = checkpoints.read_state(directory)
                streak = GuardState.from_json(document.get("guard")).streak
                if document["step"] < state.step and streak == 0:
                    yield directory, document

        document = _restore_newest(context, good_checkpoints())
        if document is None:
            raise TrainingError(
                f"{state.guard.streak} bad steps in a row (guard.max_consecutive), and "
                f"{context.directory} has no checkpoint from before them to roll back to -> check "
                "the data and the learning rate, and save more often (checkpoint.every_steps)"
            )

        # Refuse to return to one checkpoint too often: its next steps are bad again.
        stored_guard = GuardState.from_json(document.get("guard"))
        is_same_step = state.guard.rolled_back_to == document["step"]
        guard = replace(
            stored_guard,
            num_skipped=state.guard.num_skipped,
            rolled_back_to=document["step"],
            num_rollbacks=state.guard.num_rollbacks + 1 if is_same_step else 1,
        )
        if guard.num_rollbacks > section.max_rollbacks:
            raise TrainingError(
                f"steps were bad again after the run rolled back to step {document['step']} "
                f"{section.max_rollbacks} times (guard.max_rollbacks); see the events in "
                f"{context.directory}/metrics.jsonl, then resume with another optimizer.lr or data"
            )
        if context.log.metrics is not None:
            context.log.metrics.roll_back(document["step"], state.samples)
        context.log.event(
            "rolled_back", state, first_sample=document["samples"], to_step=document["step"]
        )
        context.log.info(
            f"step {state.step}: {state.guard.streak} bad steps in a row; rolled back to step "
            f"{document['step']}, samples {document['samples']} to {state.samples - 1} skipped"
        )
        best = BestSoFar.from_json(document.get("best"))
        restored = replace(state, step=document["step"], guard=guard, best=best)
        self._refuse_earlier_segment(restored)
        if self.memory_saver is not None:
            self.memory_saver.forget()  # checkpoints in memory contain the abandoned steps
        return restored

    def restore_alike(self, state: TrainState, differing: Differing) -> TrainState:
        """Remove the checkpoints after ``differing.alike_step``, the last step after which replicas
        were alike, and restore the engine from the newest remaining checkpoint; return its state,
        from which samples are read again. Collective. Raises TrainingError on every rank without a
        checkpoint, and if a host differs repeatedly: FaultyHostError on that host, if it is
        known."""
        context, directory = self.context, self.context.directory
        context.heartbeat.set_activity("rolling back", slow=True)
        self.saver.wait()  # no save may continue while checkpoints are removed
        if self.memory_saver is not None:
            self.memory_saver.forget()
        rank_names = ", ".join(f"rank {rank} on {context.hosts[rank]}" for rank in differing.ranks)
        note = "" if differing.is_known else " (one of them is wrong, and it is unknown which)"
        finding = (
            f"step {state.step + 1}: the parameters of {rank_names} differ from those of "
            f"replicas{note}"
        )

        def remove_newer() -> None:
            for step in checkpoints.list_steps(directory):
                if step > differing.alike_step:
                    checkpoints.remove(checkpoints.checkpoint_path(directory, step))

        # Newer checkpoints may contain the wrong parameters.
        context.long_work.on_main_rank(remove_newer)
        if differing.repeated_hosts:
            if differing.is_known and context.hosts[context.world.rank] in differing.repeated_hosts:
                raise FaultyHostError(
                    f"{finding}, again: memory or processors of this host may be faulty -> test "
                    "it (bigtrain doctor) before it takes part in any run; this one resumes from "
                    "before"
                )
            raise TrainingError(
                f"{finding}, again on {', '.join(differing.repeated_hosts)}, whose memory or "
                "processors may be faulty -> exclude it, and start the run again: it resumes from "
                "before"
            )

        document = _restore_newest(context, _usable_on_disk(context))
        if document is None:
            raise TrainingError(
                f"{finding}, and {directory} has no checkpoint up to step {differing.alike_step}, "
                "when they were alike -> start the run again on other hosts, and save more often "
                "(checkpoint.every_steps)"
            )
        restored = _state_of(document, state.phases)
        if context.log.metrics is not None:
            context.log.metrics.roll_back(restored.step, restored.samples)
        context.log.event(
            "replicas_differed",
            state,
            first_sample=restored.samples,
            to_step=restored.step,
            ranks=list(differing.ranks),
            is_known=differing.is_known,
        )
        context.log.info(
            f"{finding}; continuing from step {restored.step} with the same samples, newer "
            "checkpoints are removed"
        )
        self._refuse_earlier_segment(restored)
        return restored

    def _refuse_earlier_segment(self, state: TrainState) -> None:
        """Raise TrainingError if `state` is of an earlier segment, whose steps this engine does not
        train."""
        if state.step < self.begin:
            raise TrainingError(
                f"the run has to go back to step {state.step}, and its phase of batch.phases began "
                f"at step {self.begin} -> save more often (checkpoint.every_steps), check the data "
                f"and the learning rate, and remove the checkpoints after step {state.step} to "
                "continue from there"
            )
