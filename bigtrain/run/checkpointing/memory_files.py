"""Checkpoints in memory of all hosts of a launch: which are complete, and getting missing files
from other hosts before a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from bigtrain.engine.checkpoint.layout import parse_layout
from bigtrain.engine.checkpoint.snapshot import writers_of_own_parts
from bigtrain.engine.checkpoint.tensor_file import file_name
from bigtrain.engine.startup.cpu_collectives import cpu_group, gather_on_main
from bigtrain.engine.startup.long_work import on_all_ranks, on_main_rank
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.host_files import keeper_of, receive_file, send_file
from bigtrain.run.checkpointing.memory_directory import (
    MemoryDirectory,
    StoredInMemory,
    remove_stale,
    steps_of_attempts,
    stored_at,
    write_documents,
)
from bigtrain.run.context import RunContext
from bigtrain.run.run_log import RunLog
from bigtrain.settings.sections.running import DEFAULT_MEMORY_DIRECTORY

Result = TypeVar("Result")

_DOCUMENTS = (checkpoints.MANIFEST, checkpoints.STATE, checkpoints.LAYOUT)


@dataclass(frozen=True)
class MemoryCheckpoint:
    """Checkpoint that all remaining hosts together have completely. digest: of its manifest.
    holders: by tensor file, the ranks that keep a directory with it."""

    step: int
    digest: str
    holders: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Transfer:
    """A tensor file that one host's keeper sends to another's."""

    name: str
    num_bytes: int
    source: int
    target: int


class MemoryFiles:
    """Memory directories of a launch, one a host. is_keeper: whether this rank keeps its host's.
    group: of all ranks on the CPU, for the training thread. resumed_step: of the checkpoint that
    the run resumed from, if that was in memory."""

    def __init__(self, context: RunContext, directory: MemoryDirectory) -> None:
        self._context = context
        self.directory = directory
        self._keeper = keeper_of(context.hosts, context.world.rank)
        self.is_keeper = self._keeper == context.world.rank
        self.group = cpu_group(context.config.watchdog.collective_timeout_seconds)
        self.resumed_step: int | None = None

    def open(self, *, create: bool) -> None:
        """Open the directory on this rank's host, if the rank keeps it; `create`: also if it is
        missing. Not collective. Raises CheckpointError as `MemoryDirectory.open`."""
        if self.is_keeper and (create or self.directory.path.is_dir()):
            self.directory.open()

    def is_opened(self, log: RunLog, *, create: bool = True) -> bool:
        """Open the directory on every host (`create`: also where it is missing); log and return
        False if one cannot. Collective."""
        try:
            on_all_ranks(lambda: self.open(create=create), self.group)
        except CheckpointError as error:
            log.info(f"no checkpoints in memory, only on disk: {error}")
            self.close()
            return False
        return True

    def end(self) -> None:
        """Remove the directory on this rank's host, if the rank keeps it: the run is complete. Not
        collective."""
        if self.is_keeper:
            self.directory.remove()

    def close(self) -> None:
        """Let a later launch open the directory. Not collective."""
        self.directory.close()

    def complete(self, log: RunLog) -> list[MemoryCheckpoint]:
        """Return the checkpoints of which the hosts have all files, newest first, on the main rank;
        an empty list on the others. Collective. Logs why others cannot be used."""
        stored = self.directory.stored() if self.is_keeper else []
        by_rank: list[list[StoredInMemory]] = gather_on_main(stored, self.group)
        if not self._context.world.is_main:
            return []
        run = checkpoints.read_run_id(self._context.directory)
        newest_by_attempt = steps_of_attempts(self._context.directory)
        holders: dict[tuple[int, str], dict[str, list[int]]] = {}
        names: dict[tuple[int, str], frozenset[str]] = {}
        for rank, of_rank in enumerate(by_rank):
            for one in of_rank:
                if one.run != run or one.step > newest_by_attempt.get(one.attempt, -1):
                    log.info(
                        f"ignoring the checkpoint of step {one.step} in memory of "
                        f"{self._context.hosts[rank]}: the run has continued from an earlier step "
                        "since"
                    )
                    continue
                names[one.step, one.digest] = one.all_files
                files = holders.setdefault((one.step, one.digest), {})
                for name in one.files:
                    files.setdefault(name, []).append(rank)
        found = []
        for (step, digest), files in sorted(holders.items(), reverse=True):
            missing = sorted(names[step, digest] - files.keys())
            if missing:
                log.info(
                    f"skipping the checkpoint of step {step} in memory: no remaining host has "
                    f"{missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
                )
                continue
            by_name = {name: tuple(ranks) for name, ranks in files.items()}
            found.append(MemoryCheckpoint(step, digest, by_name))
        return found

    def prepare(self, checkpoint: MemoryCheckpoint, engine: TrainEngine) -> Path:
        """Get what this host lacks of a checkpoint from others; return its directory on this host.
        Collective. Raises CheckpointError on every rank if a host cannot."""
        directory = checkpoints.checkpoint_path(self.directory.path, checkpoint.step)
        source = min(min(ranks) for ranks in checkpoint.holders.values())
        rank = self._context.world.rank

        def read() -> dict[str, bytes]:
            if rank != source:
                return {}
            return {name: (directory / name).read_bytes() for name in _DOCUMENTS}

        box = [self._on_all(read)]
        dist.broadcast_object_list(box, src=source, group=self.group)
        documents = box[0]
        layout = parse_layout(documents[checkpoints.LAYOUT])
        wanted = {file_name(writer) for writer in writers_of_own_parts(engine, layout)}
        needs = gather_on_main((self._keeper, wanted), self.group)
        manifest = json.loads(documents[checkpoints.MANIFEST])
        plan = on_main_rank(lambda: _plan(checkpoint, manifest["files"], needs), self.group)
        incoming = [one for one in plan if one.target == rank]
        place = self._place(directory, checkpoint.digest)

        def make_room() -> None:
            if not incoming and (not self.is_keeper or place == directory):
                return
            self.open(create=True)
            (place / checkpoints.TENSORS).mkdir(parents=True, exist_ok=True)
            need, free = sum(one.num_bytes for one in incoming), self.directory.free_bytes()
            if need > free:
                raise CheckpointError(
                    f"{self._context.hosts[rank]} has {free} bytes free in {self.directory.path}, "
                    f"and its part takes {need}"
                )

        self._on_all(make_room)
        errors = [self._transfer(one, place, directory) for one in plan]

        def commit() -> None:
            for error in errors:
                if error is not None:
                    raise CheckpointError(f"a file from another host: {error}")
            if self.is_keeper and place != directory:
                write_documents(place, documents)
            if self.is_keeper and stored_at(directory).digest != checkpoint.digest:
                raise CorruptCheckpointError(f"{directory}: is not the checkpoint of other hosts")

        self._on_all(commit)
        return directory

    def _on_all(self, work: Callable[[], Result]) -> Result:
        """Call `on_all_ranks`; any error becomes a CheckpointError."""

        def attempt() -> Result:
            try:
                return work()
            except OSError as error:
                raise CheckpointError(str(error)) from error

        return on_all_ranks(attempt, self.group)

    def _place(self, directory: Path, digest: str) -> Path:
        """Return where this host's files of a checkpoint are written: its `directory` if that is of
        the same save, or else a partial one."""
        if self.is_keeper and directory.is_dir():
            try:
                if stored_at(directory).digest == digest:
                    return directory
            except (CorruptCheckpointError, OSError):
                pass
        return directory.with_name(f"{directory.name}.partial-{digest[:8]}")

    def _transfer(self, one: _Transfer, place: Path, directory: Path) -> OSError | None:
        """Take part in a transfer, if it is from or to this rank."""
        rank, name = self._context.world.rank, Path(checkpoints.TENSORS, one.name)
        if one.source == rank:
            return send_file(directory / name, one.num_bytes, one.target, self.group)
        if one.target != rank:
            return None
        draft = place / checkpoints.TENSORS / f".{one.name}"
        error = receive_file(draft, one.num_bytes, one.source, self.group)
        if error is None:
            draft.replace(place / name)
        return error


def _plan(
    checkpoint: MemoryCheckpoint,
    entries: Mapping[str, Mapping[str, Any]],
    needs: Sequence[tuple[int, set[str]]],
) -> list[_Transfer]:
    """Return the transfers of files that ranks need and their hosts lack, in the order in which all
    ranks make them; each from the holder that has sent least so far. entries: of the manifest, by
    path. needs: keeper and files by rank."""
    wanted: dict[int, set[str]] = {}
    for keeper, names in needs:
        wanted.setdefault(keeper, set()).update(names)
    sent: dict[int, int] = {}
    plan = []
    for keeper, names in sorted(wanted.items()):
        for name in sorted(names):
            holders = checkpoint.holders.get(name, ())
            if keeper in holders or not holders:
                continue
            num_bytes = int(entries[f"{checkpoints.TENSORS}/{name}"]["bytes"])
            source = min(holders, key=lambda holder: (sent.get(holder, 0), holder))
            sent[source] = sent.get(source, 0) + num_bytes
            plan.append(_Transfer(name, num_bytes, source, keeper))
    return plan


def open_memory_files(
    context: RunContext, log: RunLog, run_id: str | None, *, create: bool
) -> MemoryFiles | None:
    """Open the directory in memory of the run `run_id` (None: a new one) on every host; None if
    ``checkpoint.memory`` is absent, or, with a line, if a host cannot. Collective. create: also
    where it is missing, and remove what earlier runs left."""
    section = context.config.checkpoint.memory
    if section is None or run_id is None:
        return None
    directory = MemoryDirectory.of(section.directory, context.directory, run_id)
    files = MemoryFiles(context, directory)
    return files if files.is_opened(log, create=create) else None


def remove_left_over(context: RunContext, log: RunLog, keep: MemoryFiles | None) -> None:
    """Remove directories in memory that earlier runs left on this rank's host, except `keep`. Not
    collective."""
    if keeper_of(context.hosts, context.world.rank) != context.world.rank:
        return
    section = context.config.checkpoint.memory
    mount = DEFAULT_MEMORY_DIRECTORY if section is None else section.directory
    number = remove_stale(mount, None if keep is None else keep.directory.path, context.directory)
    if number:
        log.info(f"removed {number} left-over directories of checkpoints in memory from {mount}")
