"""Saver of checkpoints in memory: state is copied between two steps, and a thread writes it to
shared memory of the hosts, and of partner hosts, while training continues.

All hosts commit a checkpoint after all files are written, and a host keeps the previous checkpoint
until the next save begins. So whatever is killed, all files of a checkpoint exist.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import xxhash

from bigtrain.engine.checkpoint.io import Staging, Written
from bigtrain.engine.checkpoint.snapshot import EngineSnapshot, not_finite, snapshot_engine
from bigtrain.engine.checkpoint.tensor_file import SaveIdentity, file_name
from bigtrain.engine.startup.cpu_collectives import cpu_group, maximum_of_all
from bigtrain.engine.startup.long_work import on_all_ranks, on_main_rank
from bigtrain.errors import CheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.host_files import Partners, exchange_files
from bigtrain.run.checkpointing.memory_directory import remove_left_over, write_documents
from bigtrain.run.checkpointing.memory_files import (
    MemoryFiles,
    open_memory_files,
)
from bigtrain.run.checkpointing.saver import Saver
from bigtrain.run.context import RunContext
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.shared_memory import SPARE_BYTES
from bigtrain.run.state import TrainState
from bigtrain.settings.sections.running import GENERATIONS_IN_MEMORY
from bigtrain.system.machine import local_world_size, this_machine
from bigtrain.system.units import GIB

_MOST_FAILURES = 3  # in a row, after which only the disk is used
_LAST_WAIT_SECONDS = 10.0
"""Wait for a save in progress at the end of training or before a rollback; limited, since a partner
that has died never receives its copy."""


class MemoryTooSmallError(CheckpointError):
    """The file system in memory has no room for two checkpoints: no later save can succeed."""


@dataclass
class _MemoryWrite:
    """Save whose copy was taken. previous_step: of the checkpoint that hosts keep meanwhile. error:
    why the save failed. is_abandoned: the save must not be committed any more; changed and read
    with `lock` held."""

    step: int
    previous_step: int | None
    snapshot: EngineSnapshot
    document: dict[str, Any]
    error: Exception | None = None
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_abandoned: bool = False

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def end(self, timeout_seconds: float) -> bool:
        """Wait for the thread, and abandon a save that has not ended by then; return whether the
        save has ended."""
        if self.thread is not None:
            self.thread.join(timeout_seconds)
        with self.lock:
            self.is_abandoned = self.is_running
        return not self.is_abandoned


class MemorySaver:
    """Writer of checkpoints in memory, one at a time. Methods except `metrics` are collective. A
    failure never ends training: after several in a row, only the disk is used."""

    def __init__(self, context: SegmentContext, saver: Saver, files: MemoryFiles) -> None:
        """Remove all that `files` hold but the checkpoint that the run resumed from
        (`MemoryFiles.resumed_step`)."""
        section = context.config.checkpoint.memory
        assert section is not None
        self._context, self._section = context, section
        self._saver, self._files = saver, files
        # A group for the thread that writes; the training thread has `MemoryFiles.group`.
        self._group = cpu_group(context.config.watchdog.collective_timeout_seconds)
        # A quarter of the memory: the saver to disk may hold a copy, too.
        limit_bytes = this_machine({}).memory_bytes // (4 * local_world_size(os.environ))
        self._staging = Staging(pinned_limit_bytes=limit_bytes)
        self._partners = Partners.of(context.hosts) if section.copies else None
        self._pending: _MemoryWrite | None = None
        self._newest = files.resumed_step
        self._is_off = self._is_space_checked = self._has_logged_skip = False
        self._num_failures = self._num_saved = self._num_skipped = 0
        self._blocked_seconds = 0.0
        if section.copies and self._partners is None:
            context.log.info(
                "checkpoints in memory have no copies on partner hosts: "
                + ("there is one host" if len(set(context.hosts)) == 1 else
                   "hosts have different numbers of ranks")
            )  # fmt: skip
        self._remove_checkpoints(except_step=self._newest)

    def is_due(self, state: TrainState) -> bool:
        """Return whether `state` is to be saved."""
        return not self._is_off and state.is_multiple_of(self._section.every_steps)

    def save(self, state: TrainState, evaluation: Mapping[str, float]) -> None:
        """Copy `state` and begin to write it. Skipped while any rank still writes the previous
        checkpoint (with a line, once), and for weights that are not finite on any rank."""
        start = time.perf_counter()
        write = self._pending
        # Agree: the last save is still running, or has failed, or weights are not finite.
        flags = torch.zeros(3)
        flags[0] = float(write is not None and write.is_running)
        flags[1] = float(write is not None and not flags[0] and write.error is not None)
        flags[2] = float(not_finite(self._context.engine) is not None)
        maximum_of_all(flags, self._files.group)
        is_running, has_failed, is_not_finite = map(bool, flags)
        if is_running:
            self._num_skipped += 1
            if not self._has_logged_skip:
                self._has_logged_skip = True
                partner = " and sent to the partner" if self._partners is not None else ""
                self._context.log.info(
                    f"checkpoint of step {state.step} in memory skipped: the one before is still "
                    f"being written{partner}; this is logged once -> a larger "
                    "checkpoint.memory.every_steps"
                )
        else:
            self._count_last_save(has_failed=has_failed)
            if is_not_finite:
                self._num_skipped += 1
            elif not self._is_off:
                snapshot = snapshot_engine(self._context.engine, self._staging)
                document = self._saver.state_document(state, evaluation, snapshot)
                write = _MemoryWrite(state.step, self._newest, snapshot, document)
                # A daemon: after a failure the process must not wait for the other ranks' save.
                write.thread = threading.Thread(target=self._write, args=(write,), daemon=True)
                self._pending = write
                write.thread.start()
        self._blocked_seconds += time.perf_counter() - start

    def _count_last_save(self, *, has_failed: bool) -> None:
        """Count the last save, which has ended on every rank, and turn memory off after too many
        failures. `has_failed`: on any rank."""
        write, self._pending = self._pending, None
        if write is None:
            return
        if not has_failed:
            self._newest, self._num_failures = write.step, 0
            self._num_saved += 1
            return
        self._num_failures += 1
        self._num_skipped += 1
        can_never_succeed = isinstance(write.error, MemoryTooSmallError)
        self._is_off = can_never_succeed or self._num_failures >= _MOST_FAILURES
        text = f"checkpoint of step {write.step} in memory could not be written: "
        text += str(write.error or "another rank failed")
        self._context.log.info(
            f"{text}; from here on only the disk is used" if self._is_off else text
        )
        if self._is_off:
            self._remove_checkpoints()

    def metrics(self) -> dict[str, float] | None:
        """Return seconds that training was blocked, saves and skipped saves since the last call;
        None if nothing is written any more. Not collective."""
        if self._is_off and not (self._num_saved or self._num_skipped):
            return None
        values = {
            "blocked_seconds": self._blocked_seconds,
            "saved": float(self._num_saved),
            "skipped": float(self._num_skipped),
        }
        self._blocked_seconds, self._num_saved, self._num_skipped = 0.0, 0, 0
        return values

    def forget(self) -> None:
        """Remove all checkpoints: after a rollback, checkpoints of later steps do not belong to the
        run any more. If a save in progress does not end in time, only the disk is used from here
        on."""
        write, self._pending, self._newest = self._pending, None, None
        is_late = torch.tensor([write is not None and not write.end(_LAST_WAIT_SECONDS)]).float()
        maximum_of_all(is_late, self._files.group)
        if is_late and not self._is_off:
            self._is_off = True
            self._context.log.info(
                "a checkpoint in memory is still being written; from here on only the disk is used"
            )
        self._remove_checkpoints()

    def finish(self) -> None:
        """Remove the directory on every host, once the run's last checkpoint is on disk. A save in
        progress is given a few seconds."""
        write, self._pending = self._pending, None
        if write is not None:
            write.end(_LAST_WAIT_SECONDS)
        self._files.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pending is not None:
            self._pending.end(_LAST_WAIT_SECONDS)
        self._files.close()

    def _remove_checkpoints(self, *, except_step: int | None = None) -> None:
        if self._files.is_keeper:
            with suppress(OSError):
                self._files.directory.keep_only(except_step)

    def _write(self, write: _MemoryWrite) -> None:
        """Write and commit a checkpoint, in the thread of the save; set ``write.error`` if that
        fails. Collective over `_group`."""
        directory, group = self._files.directory, self._group
        identity = replace(self._saver.identity, step=write.step)
        partial = checkpoints.partial_path(directory.path, write.step, identity.attempt)
        tensors = partial / checkpoints.TENSORS
        snapshot = write.snapshot.tensors
        try:
            # The first save checks that two checkpoints of this host fit, with the copies of the
            # partner's files.
            needed_bytes = 0  # 0: an earlier save has checked the space
            if not self._is_space_checked:
                hosts, partners = self._context.hosts, self._partners
                sizes = [torch.zeros((), dtype=torch.int64) for _ in hosts]
                num_bytes = torch.tensor(snapshot.own_bytes, dtype=torch.int64)
                dist.all_gather(sizes, num_bytes, group=group)
                for rank, host in enumerate(hosts):
                    if host == hosts[self._context.world.rank]:
                        needed_bytes += int(sizes[rank])
                        if partners is not None:
                            needed_bytes += int(sizes[partners.source_of(rank)])
                needed_bytes *= GENERATIONS_IN_MEMORY

            def prepare() -> None:
                if not self._files.is_keeper:
                    return
                directory.keep_only(write.previous_step)
                # Later saves replace the files in the directory, so their bytes count as free.
                free_bytes = shutil.disk_usage(directory.path).free + directory.num_bytes()
                if needed_bytes and free_bytes < needed_bytes + SPARE_BYTES:
                    raise MemoryTooSmallError(
                        f"two checkpoints of this host need {needed_bytes / GIB:.3g} GiB, "
                        f"{SPARE_BYTES / GIB:.3g} stay free, and {directory.path.parent} has "
                        f"{free_bytes / GIB:.3g} GiB free -> a larger one (mount -o "
                        "remount,size=..., docker run --shm-size), or checkpoint.memory=null"
                    )
                checkpoints.prepare(partial)

            on_all_ranks(prepare, group)
            self._is_space_checked = True
            written = snapshot.write(tensors, group, identity)
            error = self._copy_to_partner(tensors)
            documents = on_main_rank(lambda: self._documents(write, written, identity), group)

            # Every host commits only after all files of all hosts are written.
            def commit() -> None:
                if error is not None:
                    raise CheckpointError(f"the copy of a partner: {error}")
                with write.lock:
                    if write.is_abandoned:
                        raise CheckpointError("it took too long")
                    if self._files.is_keeper:
                        write_documents(partial, documents)

            on_all_ranks(commit, group)
        except Exception as failure:
            write.error = failure

    def _copy_to_partner(self, tensors: Path) -> OSError | None:
        """Send this rank's file to the partner, and write the copy of the file of the rank whose
        partner this rank is. Collective. Returns the error of reading or writing."""
        if self._partners is None:
            return None
        rank = self._context.world.rank
        partner, source = self._partners.partner_of[rank], self._partners.source_of(rank)
        sent_file, copy = tensors / file_name(rank), tensors / file_name(source)
        return exchange_files(sent_file, partner, copy, source, self._group)

    def _documents(
        self, write: _MemoryWrite, written: Written, identity: SaveIdentity
    ) -> dict[str, bytes]:
        """Return the small files of a checkpoint, equal on all hosts."""
        self._context.claim.check()
        documents = checkpoints.state_files(write.document, written.layout)
        files = {
            f"{checkpoints.TENSORS}/{name}": size_and_checksum
            for name, size_and_checksum in written.files.items()
        }
        for name, data in documents.items():
            files[name] = (len(data), xxhash.xxh3_64_hexdigest(data))
        manifest = checkpoints.CheckpointManifest(identity, files)
        return {**documents, checkpoints.MANIFEST: checkpoints.manifest_text(manifest).encode()}


@contextmanager
def memory_of_earlier_launch(context: RunContext) -> Iterator[MemoryFiles | None]:
    """Open what earlier launches of the run left in memory of the hosts, until the end of the
    block; None if the run is new, or a host cannot. Collective."""
    run_id = context.long_work.on_main_rank(lambda: checkpoints.read_run_id(context.directory))
    files = open_memory_files(context, run_id, create=False)
    try:
        yield files
    finally:
        if files is not None:
            files.close()


@contextmanager
def memory_saver_of(
    context: SegmentContext, saver: Saver, files: MemoryFiles | None
) -> Iterator[MemorySaver | None]:
    """Yield the saver of checkpoints in memory; None, with a line in the log, if a host cannot
    write them. Collective; the run directory must be claimed. `files`: opened before the resume, if
    any. Removes directories that earlier runs left in memory of the hosts."""
    if files is None:
        files = open_memory_files(context, saver.identity.run, create=True)
    elif not files.is_opened():
        files = None
    remove_left_over(context, None if files is None else files.directory.path)
    if files is None:
        yield None
        return
    with MemorySaver(context, saver, files) as memory_saver:
        yield memory_saver
