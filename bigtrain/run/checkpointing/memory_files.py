"""Checkpoints in memory of all hosts of a launch: which are complete, and getting missing files
from other hosts before a resume."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from bigtrain.engine.checkpoint.layout import CheckpointLayout, parse_layout
from bigtrain.engine.checkpoint.snapshot import writers_of_own_parts
from bigtrain.engine.checkpoint.tensor_file import file_name
from bigtrain.engine.startup.cpu_collectives import (
    combine_on_main,
    cpu_group,
)
from bigtrain.engine.startup.long_work import on_all_ranks, on_main_rank
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.host_files import receive_file, send_file
from bigtrain.run.checkpointing.memory_directory import (
    MemoryCheckpoint,
    MemoryDirectory,
    commit_directory,
    keeper_of,
    steps_of_attempts,
    stored_at,
)
from bigtrain.run.context import RunContext

Result = TypeVar("Result")

_DOCUMENTS = (checkpoints.MANIFEST, checkpoints.STATE, checkpoints.LAYOUT)


@dataclass
class _Holdings:
    """Files of a checkpoint on some hosts. run, attempt, writers: see `StoredInMemory`. first:
    lowest keeper (rank) of a host with files. ranges: (begin, end) of the writers whose files are
    on the hosts, in order; adjacent ranges are joined, so that few are sent."""

    run: str
    attempt: str
    writers: int
    first: int
    num_hosts: int
    ranges: list[tuple[int, int]]

    def add(self, further: _Holdings) -> None:
        """Add the files of other hosts."""
        self.num_hosts += further.num_hosts
        self.first = min(self.first, further.first)
        self.ranges = _joined_ranges(self.ranges + further.ranges)

    def missing(self) -> list[str]:
        """Return the names of files that no host has."""
        writers_on_hosts = {rank for begin, end in self.ranges for rank in range(begin, end)}
        return [file_name(rank) for rank in range(self.writers) if rank not in writers_on_hosts]


_AllHoldings = dict[tuple[int, str], _Holdings]
"""By step and digest of the checkpoint's manifest."""


def _joined_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return `ranges` in order, with adjacent and overlapping ranges joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            last_begin, last_end = joined[-1]
            joined[-1] = (last_begin, max(end, last_end))
        else:
            joined.append((begin, end))
    return joined


def _add_holdings(total: _AllHoldings, further: _AllHoldings) -> _AllHoldings:
    for key, holdings in further.items():
        if key in total:
            total[key].add(holdings)
        else:
            total[key] = holdings
    return total


@dataclass
class _Needs:
    """Files that some ranks of a host need. num_further_ranks: ranks of the host that are not
    counted yet. present: files on the host, which need not be fetched."""

    num_ranks: int
    num_further_ranks: int
    needed: set[str]
    present: set[str]


_NeedsOfHosts = dict[int, _Needs]
"""By the rank that keeps a host's directory."""


def _add_needs(needs_by_keeper: _NeedsOfHosts, further_needs: _NeedsOfHosts) -> _NeedsOfHosts:
    """Combine the needs of hosts. Once all ranks of a host are counted, only the files that the
    host lacks are left, mostly none."""
    for keeper, further in further_needs.items():
        needs = needs_by_keeper.setdefault(keeper, further)
        if needs is not further:
            needs.num_further_ranks -= further.num_ranks
            needs.num_ranks += further.num_ranks
            needs.needed |= further.needed
            needs.present |= further.present
        if not needs.num_further_ranks:
            needs.needed -= needs.present
            needs.present.clear()
            if not needs.needed:
                del needs_by_keeper[keeper]
    return needs_by_keeper


_Holders = dict[str, dict[int, int]]
"""By path, bytes of the file by the rank that keeps the directory of a host that has it."""


def _add_holders(
    lacking: Mapping[str, int], holders_by_path: _Holders, further_holders: _Holders
) -> _Holders:
    """Combine the holders of files. lacking: number of hosts that lack a file, by path; more
    holders of the file are dropped, since each receiver then has a separate sender."""
    for path, further in further_holders.items():
        holders = holders_by_path.get(path, {}) | further
        keepers = sorted(holders)[: lacking[path]]
        holders_by_path[path] = {keeper: holders[keeper] for keeper in keepers}
    return holders_by_path


@dataclass(frozen=True)
class _Transfer:
    """File that the keeper `source` sends to the keeper `target`. path: relative to the directory
    of the checkpoint."""

    path: str
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

    def is_opened(self, *, create: bool = True) -> bool:
        """Open the directory on every host (`create`: also where it is missing); log and return
        False if one cannot. Collective."""
        try:
            on_all_ranks(lambda: self.open(create=create), self.group)
        except CheckpointError as error:
            self._context.log.info(f"no checkpoints in memory, only on disk: {error}")
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

    def complete(self) -> list[MemoryCheckpoint]:
        """Return the checkpoints of which the hosts have all files, newest first, on the main rank;
        an empty list on other ranks. Collective. Logs why checkpoints cannot be used."""
        # Combine the tensor files of all hosts, by checkpoint.
        host_holdings: _AllHoldings = {}
        stored_checkpoints = self.directory.stored() if self.is_keeper else []
        for stored in stored_checkpoints:
            ranks = [rank for rank in range(stored.writers) if file_name(rank) in stored.files]
            ranges = _joined_ranges([(rank, rank + 1) for rank in ranks])
            host_holdings[stored.step, stored.digest] = _Holdings(
                stored.run, stored.attempt, stored.writers, self._keeper, 1, ranges
            )
        all_holdings = combine_on_main(host_holdings, _add_holdings, self.group)
        if all_holdings is None:
            return []

        # Keep checkpoints that still belong to the run and of which no file is missing.
        run = checkpoints.read_run_id(self._context.directory)
        newest_by_attempt = steps_of_attempts(self._context.directory)
        complete = []
        for (step, digest), holdings in sorted(all_holdings.items(), reverse=True):
            newest_valid = newest_by_attempt.get(holdings.attempt, -1)  # -1: an unknown launch
            if holdings.run != run or step > newest_valid:
                hosts = self._context.hosts[holdings.first]
                hosts += f" and {holdings.num_hosts - 1} more" if holdings.num_hosts > 1 else ""
                self._context.log.info(
                    f"ignoring the checkpoint of step {step} in memory of {hosts}: the run has "
                    "continued from an earlier step since"
                )
            elif missing := holdings.missing():
                names = missing[0] + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                self._context.log.info(
                    f"skipping the checkpoint of step {step} in memory: no remaining host has "
                    f"{names}"
                )
            else:
                complete.append(MemoryCheckpoint(step, digest, holdings.first))
        return complete

    def prepare(self, checkpoint: MemoryCheckpoint, engine: TrainEngine) -> Path:
        """Get the files of a checkpoint that this host's ranks read and the host lacks from other
        hosts; return the checkpoint's directory on this host. Collective. Raises CheckpointError on
        every rank if a host cannot."""
        directory = checkpoints.checkpoint_path(self.directory.path, checkpoint.step)
        partial = directory.with_name(f"{directory.name}.partial-{checkpoint.digest[:8]}")
        local_bytes: dict[str, int] = {}
        documents: set[str] = set()
        if self.is_keeper:
            local_bytes, documents = _files_at(directory, checkpoint.digest), set(_DOCUMENTS)
        # Files are added to the checkpoint if the host has a part of it; else to a new directory.
        destination = directory if local_bytes else partial

        # First the small files, which list the tensor files that the ranks of this host read.
        self._fetch(documents, local_bytes, directory, destination)

        def read_layout() -> CheckpointLayout:
            # Ranks that keep no directory do not know to which one the keeper has fetched.
            fetched = partial / checkpoints.LAYOUT
            path = fetched if fetched.exists() else directory / checkpoints.LAYOUT
            return parse_layout(path.read_bytes())

        layout = self._on_all(read_layout)
        tensor_paths = {
            f"{checkpoints.TENSORS}/{file_name(writer)}"
            for writer in writers_of_own_parts(engine, layout)
        }
        self._fetch(tensor_paths, local_bytes, directory, destination)

        def commit() -> None:
            if self.is_keeper and destination != directory:
                commit_directory(destination)
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

    def _fetch(
        self, needed: Set[str], local_bytes: Mapping[str, int], directory: Path, destination: Path
    ) -> None:
        """Get from other hosts the files that this rank needs and its host lacks. local_bytes: on
        the rank that keeps the host's directory, bytes of the files by path. Collective. Raises
        CheckpointError."""
        plan = self._agreed_plan(needed, local_bytes)
        rank = self._context.world.rank
        incoming = [transfer for transfer in plan if transfer.target == rank]

        def prepare_destination() -> None:
            if not incoming:
                return
            self.open(create=True)
            (destination / checkpoints.TENSORS).mkdir(parents=True, exist_ok=True)
            needed_bytes = sum(transfer.num_bytes for transfer in incoming)
            free_bytes = shutil.disk_usage(self.directory.path).free
            if needed_bytes > free_bytes:
                raise CheckpointError(
                    f"{self._context.hosts[rank]} has {free_bytes} bytes free in "
                    f"{self.directory.path}, and its part takes {needed_bytes}"
                )

        def raise_error() -> None:
            for error in errors:
                if error is not None:
                    raise CheckpointError(f"a file from another host: {error}")

        # An error on a rank is raised on all ranks, before and after the transfers.
        if plan:
            self._on_all(prepare_destination)
            errors = [self._transfer(transfer, directory, destination) for transfer in plan]
            self._on_all(raise_error)

    def _agreed_plan(self, needed: Set[str], local_bytes: Mapping[str, int]) -> list[_Transfer]:
        """Return the transfers of files that hosts lack, in the order in which all ranks make them.
        Collective."""
        num_host_ranks = self._context.hosts.count(self._context.hosts[self._context.world.rank])
        keeper = self._keeper
        rank_needs = {keeper: _Needs(1, num_host_ranks - 1, set(needed), set(local_bytes))}

        # The number of hosts that lack a file, by path; mostly no file is missing anywhere.
        needs = combine_on_main(_add_needs({}, rank_needs), _add_needs, self.group) or {}
        lacking = on_main_rank(
            lambda: Counter(path for host in needs.values() for path in host.needed), self.group
        )
        if not lacking:
            return []

        # The hosts that have a lacking file; then the sender of each transfer.
        sendable_paths = lacking.keys() & local_bytes.keys()
        rank_holders = {path: {keeper: local_bytes[path]} for path in sendable_paths}
        holders = combine_on_main(rank_holders, partial(_add_holders, lacking), self.group) or {}
        return on_main_rank(
            lambda: plan_transfers({rank: needs[rank].needed for rank in needs}, holders),
            self.group,
        )

    def _transfer(self, transfer: _Transfer, directory: Path, destination: Path) -> OSError | None:
        """Send or receive the file of a transfer from or to this rank; return the error of reading
        or writing the file."""
        rank = self._context.world.rank
        if transfer.source == rank:
            path = directory / transfer.path
            return send_file(path, transfer.num_bytes, transfer.target, self.group)
        if transfer.target != rank:
            return None
        target = destination / transfer.path
        draft = target.with_name(f".{target.name}")
        error = receive_file(draft, transfer.num_bytes, transfer.source, self.group)
        if error is None:
            draft.replace(target)
        return error


def _files_at(directory: Path, digest: str) -> dict[str, int]:
    """Return the bytes of the files at `directory`, by path; empty if this host has no checkpoint
    there with the manifest of this `digest`."""
    with suppress(CorruptCheckpointError, OSError):
        stored = stored_at(directory)
        if stored.digest == digest:
            paths = [*_DOCUMENTS, *(f"{checkpoints.TENSORS}/{name}" for name in stored.files)]
            return {path: (directory / path).stat().st_size for path in paths}
    return {}


def plan_transfers(needs: Mapping[int, Set[str]], holders: _Holders) -> list[_Transfer]:
    """Return the transfers of files that hosts need, each from the holder that has sent least so
    far. needs: paths by the rank that keeps a host's directory."""
    sent_bytes: dict[int, int] = {}
    plan = []
    for keeper, needed_paths in sorted(needs.items()):
        for path in sorted(needed_paths & holders.keys()):
            source = min(holders[path], key=lambda holder: (sent_bytes.get(holder, 0), holder))
            num_bytes = holders[path][source]
            sent_bytes[source] = sent_bytes.get(source, 0) + num_bytes
            plan.append(_Transfer(path, num_bytes, source, keeper))
    return plan


def open_memory_files(
    context: RunContext, run_id: str | None, *, create: bool
) -> MemoryFiles | None:
    """Open the directory in memory of the run `run_id` on every host; `create`: also if it is
    missing. Return None without ``checkpoint.memory``, without `run_id` (a new run), and, with a
    line in the log, if a host cannot open it. Collective."""
    section = context.config.checkpoint.memory
    if section is None or run_id is None:
        return None
    directory = MemoryDirectory.of(section.directory, context.directory, run_id)
    files = MemoryFiles(context, directory)
    return files if files.is_opened(create=create) else None
