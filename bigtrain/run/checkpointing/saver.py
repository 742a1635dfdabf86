"""Saver of a run: state is copied between two steps and written while training continues."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.io import Staging
from bigtrain.engine.checkpoint.snapshot import (
    EngineSnapshot,
    checkpoint_bytes,
    refuse_not_finite,
    snapshot_engine,
)
from bigtrain.engine.checkpoint.tensor_file import SaveIdentity
from bigtrain.engine.startup.cpu_collectives import cpu_group
from bigtrain.engine.startup.long_work import on_main_rank
from bigtrain.errors import CheckpointError, LostRunTokenError
from bigtrain.models.export.verified import Probe
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.changed_settings import BASE, fingerprint
from bigtrain.run.checkpointing.retention import retain
from bigtrain.run.run_directory import describe_environment
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.state import TrainState
from bigtrain.system.machine import local_world_size, this_machine

if TYPE_CHECKING:
    from bigtrain.run.reporting.run_copies import RunCopies

# Wait for a save in progress after an error that ends the run. The save fails at once if another
# rank has died.
_LAST_WAIT_SECONDS = 60.0

MIB = 1 << 20
# Disk space that a save keeps free for probe, metadata, log and metrics.
_SPARE_BYTES = 64 * MIB

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Content:
    """State to write: a copy of the engine's tensors, the logits of a probe, and the JSON."""

    snapshot: EngineSnapshot
    probe: Probe
    document: dict[str, Any]


@dataclass
class _Write:
    """Save whose copy was taken. content: None if the weights are not finite. start: by
    `time.perf_counter`. error: why the save failed, equal on every rank; lost_token: the error if
    this launch has lost the run directory."""

    step: int
    content: _Content | None
    start: float
    stall_seconds: float = 0.0
    error: str | None = None
    lost_token: LostRunTokenError | None = None
    notes: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None
    is_reported: bool = False


class Saver:
    """Writer of checkpoints, one at a time. All methods except `report` and `state_document` are
    collective. On exit of the context the last save must have succeeded; after an exception the
    save is given a minute. identity: run and attempt of this launch's checkpoints, without a
    step."""

    def __init__(
        self,
        context: SegmentContext,
        *,
        copies: RunCopies | None = None,
        on_complete: Callable[[Path], object] = lambda _: None,
    ) -> None:
        """Remove leftovers of interrupted saves. The run directory must be claimed. `copies`:
        of every checkpoint, on the main rank. `on_complete`: gets the directory of each checkpoint,
        in the training thread, from `report` and `wait`."""
        self._on_complete = on_complete
        self._context, self._copies = context, copies
        self._section = context.config.checkpoint
        # A separate group: the thread's collectives must not mix with the collectives of training.
        self._group = cpu_group(context.config.watchdog.collective_timeout_seconds)
        # Half of the free memory is left to the operating system, the data and the export.
        limit_bytes = this_machine({}).memory_bytes // (2 * local_world_size(os.environ))
        self._staging = Staging(copies=self._section.asynchronous, pinned_limit_bytes=limit_bytes)
        self._pending: _Write | None = None
        self._num_failures = 0
        # Fields of state.json that all checkpoints share; empty except on the main rank.
        self._run_document: dict[str, Any] = {}

        def begin() -> SaveIdentity:
            token = context.claim.token
            attempt = "" if token is None else token.holder.attempt
            identity = SaveIdentity(checkpoints.make_run_id(context.directory), 0, attempt)
            self._run_document = {
                "format": checkpoints.FORMAT,
                "run": identity.run,
                "data_hash": context.inputs.data_hash,
                "config": context.run.recorded_config.model_dump(mode="json"),
                "deepspeed": context.run.engine.deepspeed,
                "parameters": context.inputs.model_plan.parameters.record(),
                "environment": describe_environment(
                    context.run, context.inputs, context.hosts, context.device
                ),
            }
            if context.config.adapters is not None:
                assert context.base is not None
                self._run_document[BASE] = fingerprint(context.base.sums)
            checkpoints.clear_garbage(context.directory)
            return identity

        self.identity = self._on_main(begin)

    def state_document(
        self, state: TrainState, evaluation: Mapping[str, float], snapshot: EngineSnapshot
    ) -> dict[str, Any]:
        """Return the contents of ``state.json`` for a checkpoint on disk or in memory, complete on
        the main rank."""
        return {
            **self._run_document,
            **asdict(state),
            "held_out_loss": evaluation.get("held_out_loss"),
            "evaluation": dict(evaluation),
            "engine": snapshot.scalars,
        }

    def save(self, state: TrainState, evaluation: Mapping[str, float]) -> None:
        """Save `state` after the previous save has finished; asynchronous, return as soon as a copy
        is taken. `evaluation`: metrics measured at it, by the names of ``evaluation.best.metric``.
        Weights that are not finite are never written: a failed save. Raises CheckpointError on
        every rank when ``checkpoint.max_failures`` saves in a row have failed."""
        start = time.perf_counter()
        self.wait()
        try:
            refuse_not_finite(self._context.engine, self._group)
        except CheckpointError as error:
            # A save that has failed already: `wait` counts it.
            self._pending = _Write(state.step, None, start, error=str(error))
            return
        snapshot = snapshot_engine(self._context.engine, self._staging)
        # The model's logits for a fixed input, with which an export of the checkpoint is compared.
        config, engine = self._context.config, self._context.engine
        ids = Probe.make_input(
            engine.module.config.get_text_config().vocab_size,  # type: ignore[operator, union-attr]
            config.batch.sequence_length,
            # A score head returns a row for each of 8 samples; a language model for each token.
            8 if config.objective.kind.scores_samples else 1,
        )
        probe = Probe(ids, engine.logits(ids), config.precision.dtype)
        document = self.state_document(state, evaluation, snapshot)
        write = _Write(state.step, _Content(snapshot, probe, document), start)
        self._pending = write
        if self._section.asynchronous:
            write.stall_seconds = time.perf_counter() - start
            # A daemon: after a failure the process must not wait for the other ranks' save.
            write.thread = threading.Thread(target=self._write, args=(write,), daemon=True)
            write.thread.start()
        else:
            self._write(write)
            write.stall_seconds = time.perf_counter() - start
            self.wait()

    def report(self) -> None:
        """Log how the last save and copies ended, if they did since the last call. Does not
        block."""
        if self._copies is not None:
            for note in self._copies.notes():
                self._context.log.info(note)
        write = self._pending
        if write is None or write.is_reported:
            return
        if write.thread is not None and write.thread.is_alive():
            return
        if write.lost_token is not None:
            return  # log.txt belongs to the later launch, or was deleted
        write.is_reported = True
        for note in write.notes:
            self._context.log.info(note)
        if write.error is not None:
            self._context.log.info(
                f"checkpoint of step {write.step} could not be written: {write.error}; older ones "
                f"are kept (failure {self._num_failures + 1} of checkpoint.max_failures = "
                f"{self._section.max_failures})"
            )
        else:
            self._on_complete(checkpoints.checkpoint_path(self._context.directory, write.step))

    def wait(self, *, must_succeed: bool = False) -> None:
        """Wait until no save is in progress. Raises CheckpointError on every rank when
        `checkpoint.max_failures` saves in a row have failed, or the last one did and
        `must_succeed`; the error of `RunToken.check` if it failed because this launch has lost the
        run directory."""
        write = self._pending
        if write is None:
            return
        if write.thread is not None:
            write.thread.join()
        self.report()
        self._pending = None
        if write.lost_token is not None:
            raise write.lost_token
        if write.error is None:
            self._num_failures = 0
            return
        self._num_failures += 1
        if must_succeed or self._num_failures >= self._section.max_failures:
            raise CheckpointError(
                f"{self._num_failures} checkpoint{'s' if self._num_failures > 1 else ''} in a row "
                f"could not be written, the last one of step {write.step}: {write.error}; when "
                "restarted, the run resumes from the newest complete one"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:
            self.wait(must_succeed=True)
        elif self._pending is not None and self._pending.thread is not None:
            self._pending.thread.join(_LAST_WAIT_SECONDS)
            self.report()

    def _write(self, write: _Write) -> None:
        """Write and commit a checkpoint; set ``write.error`` if that fails on any rank."""
        content, permit = write.content, self._context.claim.check
        assert content is not None
        identity = replace(self.identity, step=write.step)
        partial = checkpoints.partial_path(self._context.directory, write.step, identity.attempt)

        def prepare() -> None:
            permit()
            checkpoints.prepare(partial)
            # Before the disk is full: otherwise the run's log and metrics could not be written.
            _require_space(partial.parent, num_bytes)

        def commit() -> None:
            for name, data in checkpoints.state_files(content.document, written.layout).items():
                (partial / name).write_bytes(data)
            content.probe.save(partial / checkpoints.PROBE)
            final = checkpoints.commit(partial, written.files, identity, permit)
            times = f"written in {time.perf_counter() - write.start:.1f} s"
            if self._section.asynchronous:
                times += f", training was blocked for {write.stall_seconds:.2f} s"
            write.notes.append(f"checkpoint of step {write.step}: {final} ({times})")
            if self._copies is not None:
                self._copies.add(final)
            write.notes.extend(self._retain(write.step))

        try:
            num_bytes = content.snapshot.tensors.num_bytes(self._group)
            self._on_main(prepare)
            tensors = partial / checkpoints.TENSORS
            written = content.snapshot.tensors.write(tensors, self._group, identity)
            self._on_main(commit)
        except Exception as error:
            # No error ends training here; the error is equal on every rank.
            write.lost_token = self._lost_run_token(error)
            write.error = str(write.lost_token or error) or type(error).__name__
            if self._context.world.is_main:
                shutil.rmtree(partial, ignore_errors=True)

    def _lost_run_token(self, error: Exception) -> LostRunTokenError | None:
        """Return the error of `RunToken.check` if it is the cause of `error`: a later launch, or
        the user, has deleted the files of this launch."""
        if isinstance(error, LostRunTokenError):
            return error
        try:
            self._on_main(self._context.claim.check)
        except LostRunTokenError as lost:
            return lost
        except Exception:  # a rank has died
            return None
        return None

    def _on_main(self, action: Callable[[], Result]) -> Result:
        """Call `on_main_rank` in the group of saves; any error except a lost run token becomes a
        CheckpointError."""

        def attempt() -> Result:
            try:
                return action()
            except LostRunTokenError:
                raise
            except Exception as error:
                raise CheckpointError(str(error) or type(error).__name__) from error

        return on_main_rank(attempt, self._group)

    def finish_retention(self, step: int) -> None:
        """Remove checkpoints that the run no longer keeps, if an earlier launch was killed after it
        saved the last checkpoint, of `step`, and before it removed them."""
        for note in self._on_main(lambda: self._retain(step)):
            self._context.log.info(note)

    def _retain(self, step: int) -> list[str]:
        best = self._context.config.evaluation.best
        permit = self._context.claim.check
        try:
            retain(self._context.directory, step, self._section, permit, best)
        except OSError as error:
            return [f"an older checkpoint could not be removed: {error}"]
        return []


def refuse_small_disk(context: SegmentContext) -> None:
    """Raise CheckpointError on every rank if the disk has no space for a checkpoint. Collective.
    Writes nothing; called before the first step, whose work would be lost."""
    coordinates = context.topology.coordinates(context.world.rank)
    num_bytes = checkpoint_bytes(context.engine) if coordinates.is_first("pipeline") else 0
    total = torch.tensor(num_bytes, dtype=torch.int64, device=context.device)
    dist.all_reduce(total)

    def check() -> None:
        try:
            _require_space(context.directory / "checkpoints", int(total))
        except CheckpointError as error:
            remedy = "make room, or choose another output.directory"
            text = f"the run could not save a checkpoint: {error} -> {remedy}"
            raise CheckpointError(text) from error

    context.long_work.on_main_rank(check)


def _require_space(directory: Path, num_bytes: int) -> None:
    """Raise CheckpointError without space for a checkpoint of `num_bytes` in `directory`, which
    need not exist."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    total_bytes, _, free_bytes = shutil.disk_usage(existing)
    is_size_known = total_bytes > 0  # some file systems do not report their size
    if is_size_known and free_bytes < num_bytes + _SPARE_BYTES:
        raise CheckpointError(
            f"no space left for it: {directory} has {free_bytes / MIB:,.1f} MiB free, and "
            f"{num_bytes / MIB:,.1f} MiB are needed, plus {_SPARE_BYTES // MIB} in reserve"
        )
