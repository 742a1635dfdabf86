"""Status store to which all ranks report their positions, and the diagnosis of a hung run from
them.

The store is the process group's TCPStore, whose server is a C++ thread of the main rank or of
torchrun's agent and responds while Python hangs. Each rank has a separate connection. An operation
may block forever if a host is lost, so one thread executes all operations and callers wait a few
seconds; after an operation that takes too long the store counts as lost, until it is reconnected.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from bigtrain.engine.startup.long_work import on_main_rank
from bigtrain.system.world import World

_NUM_SHOWN_RANKS = 16
_OPERATION_SECONDS = 5.0
_CONNECT = timedelta(seconds=30)
_ALARM, _LEADER, _FINISHED, _MOVES, _SLOW = "alarm", "leader", "finished", "moves", "slow"

Result = TypeVar("Result")


def _keys(prefix: str, num_ranks: int) -> list[str]:
    return [f"{prefix}/{rank}" for rank in range(num_ranks)]


def open_status_store(world: World) -> StatusStore | None:
    """Open the status store of all ranks; None if this rank cannot reach it. Collective."""
    # A new token for each launch: torchrun's store outlives a restart of the ranks.
    location = StoreLocation(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), secrets.token_hex(8)
    )

    def create_entries() -> str:
        with suppress(RuntimeError):  # raised again below, where it is reported
            location.create_entries(world.size)
        return location.token

    token = on_main_rank(create_entries)
    location = replace(location, token=token)
    try:
        return StatusStore(location, world)
    except RuntimeError as error:
        print(
            f"watchdog: rank {world.rank} cannot reach the store at "
            f"{location.address}:{location.port}, and through it the other ranks: {error}",
            file=sys.stderr,
        )
        return None


@dataclass(frozen=True)
class StoreLocation:
    """Location of a status store: the store's address, and a token that is new at every launch."""

    address: str
    port: int
    token: str

    def connect(self) -> Any:
        """Connect to the store. Raises RuntimeError if it cannot be reached within half a
        minute."""
        store = dist.TCPStore(
            self.address, self.port, is_master=False, timeout=_CONNECT, wait_for_workers=False
        )
        return dist.PrefixStore(f"watchdog/{self.token}", store)

    def create_entries(self, num_ranks: int) -> None:
        """Create empty entries for every rank, before any rank reads: a single call then reads all
        entries without waiting. Raises as `connect`."""
        keys = [*_keys("place", num_ranks), *_keys("answer", num_ranks)]
        self.connect().multi_set(keys, [""] * len(keys))


class StatusStore:
    """Access of this rank to the status store. No method raises; None means that it is lost."""

    def __init__(self, location: StoreLocation, world: World) -> None:
        """Connect; the main rank has created the entries. Raises as `StoreLocation.connect`."""
        self._store = location.connect()
        for key in (f"place/{world.rank}", f"answer/{world.rank}"):
            self._store.compare_set(key, "", "")  # in a store that was restarted
        self._location, self._world = location, world
        self._rank, self._size = world.rank, world.size
        self.is_lost = False
        self._requests: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        threading.Thread(target=self._work, name="watchdog-status-store", daemon=True).start()

    def report(self, position: Position, moved: bool, is_slow: bool) -> None:
        """Report this rank's position, whether it has `moved` since the last report, and whether it
        is in a slow activity, for which other ranks may wait (`is_slow`)."""
        text = position.to_json()
        self._do(lambda: self._store.set(f"place/{self._rank}", text))
        if moved:
            self._do(lambda: self._store.add(_MOVES, 1))
        if is_slow:
            self._do(lambda: self._store.add(_SLOW, 1))

    def moves(self) -> int | None:
        """Return a counter that grows while any rank makes progress."""
        return self._do(lambda: self._store.add(_MOVES, 0))

    def slow_reports(self) -> int | None:
        """Return a counter that grows while any rank reports that it is in a slow activity."""
        return self._do(lambda: self._store.add(_SLOW, 0))

    def alarm(self) -> str | None:
        """Return the name of the alarm, if one was raised."""
        return self._do(
            lambda: self._store.get(_ALARM).decode() if self._store.check([_ALARM]) else None
        )

    def raise_alarm(self, name: str) -> str | None:
        """Raise the alarm; return the name given by the rank that raised it first."""
        return self._do(lambda: self._store.compare_set(_ALARM, "", name).decode())

    def answer(self, position: Position) -> None:
        """Answer the alarm."""
        text = position.to_json()
        self._do(lambda: self._store.set(f"answer/{self._rank}", text))

    def leads(self, is_main: bool, answer_seconds: float, report_seconds: float) -> bool:
        """Return whether this rank writes the report: the main rank, or, if the main rank does not
        begin within `answer_seconds`, the first rank that claims it. Ranks that do not write wait
        for the report or a timeout."""
        if not is_main and self._wait(_LEADER, answer_seconds):
            self._wait(_FINISHED, answer_seconds + 2 * report_seconds)
            return False
        leader = self._do(lambda: self._store.compare_set(_LEADER, "", str(self._rank)).decode())
        if leader in (None, str(self._rank)):
            return True
        self._wait(_FINISHED, answer_seconds + 2 * report_seconds)
        return False

    def answers(self, seconds: float) -> dict[int, Position] | None:
        """Return the answers of all ranks, or after `seconds` the received answers; None if the
        store is lost."""
        until = time.monotonic() + seconds
        while not self.is_lost:
            received = self._read("answer")
            if received is not None and (len(received) == self._size or time.monotonic() > until):
                return received
            time.sleep(0.1)
        return None

    def last_known(self) -> dict[int, Position]:
        """Return the last position that each rank reported in a step, by rank. After an alarm ranks
        answer instead."""
        return self._read("place") or {}

    def finish(self) -> None:
        """Release the ranks that wait for the report, and give them time to end."""
        self._do(lambda: self._store.set(_FINISHED, "1"))
        if self._rank == 0 and not self.is_lost:
            time.sleep(0.5)  # ranks read the store, which may end with this process

    def reopened(self) -> StatusStore | None:
        """Return this status store over a new connection; None if that fails."""
        try:
            return StatusStore(self._location, self._world)
        except RuntimeError:
            return None

    def close(self) -> None:
        """Stop the thread; later calls do nothing."""
        self.is_lost = True
        self._requests.put(None)

    def _wait(self, key: str, seconds: float) -> bool:
        """Return whether `key` appears within `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.is_lost:
            if self._do(lambda: self._store.check([key])):
                return True
            time.sleep(0.1)
        return False

    def _read(self, prefix: str) -> dict[int, Position] | None:
        """Read all ranks' entries in one call: a call for each would take seconds for thousands."""

        def read() -> dict[int, Position]:
            texts = enumerate(self._store.multi_get(_keys(prefix, self._size)))
            return {rank: Position.from_json(text.decode()) for rank, text in texts if text}

        return self._do(read)

    def _do(self, action: Callable[[], Result]) -> Result | None:
        """Return the result of `action` in the thread of the store; None, and mark the store as
        lost, if it fails or takes too long."""
        if self.is_lost:
            return None
        result: SimpleQueue[Any] = SimpleQueue()
        self._requests.put((action, result))
        try:
            outcome, value = result.get(timeout=_OPERATION_SECONDS)
        except Empty:
            outcome, value = "late", None
        self.is_lost = outcome != "done"
        return value if outcome == "done" else None

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            action, result = request
            try:
                result.put(("done", action()))
            except Exception as error:  # any error means that the store is lost
                result.put(("failed", error))


@dataclass(frozen=True)
class Position:
    """Position of one rank. step: counted from 1; 0 before the first step. collective: in which it
    waits, or None."""

    rank: int
    host: str
    pid: int
    step: int
    activity: str
    module: str | None
    collective: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        return cls(**json.loads(text))

    @property
    def description(self) -> str:
        """Step, activity and layer, as text."""
        layer = f", {self.module}" if self.module else ""
        return f"step {self.step}, {self.activity}{layer}"

    def __str__(self) -> str:
        waits = f"in {self.collective}" if self.collective else "outside of collectives"
        return f"rank {self.rank} on {self.host} (process {self.pid}): {self.description}, {waits}"


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis. ranks: lagging ones, lowest first; empty if none differs."""

    ranks: tuple[int, ...]
    text: str


def diagnose(
    answers: Mapping[int, Position], last_known: Mapping[int, Position], hosts: Sequence[str]
) -> Diagnosis:
    """Return the lagging ranks of a world whose rank `r` runs on ``hosts[r]``. `answers`: positions
    of the ranks that still respond; `last_known`: the last position reported before, by rank.

    In order: unresponsive ranks; ranks outside of collectives while others wait in a collective;
    ranks in an earlier step; ranks in another collective than most.
    """
    # A rank that does not respond explains why others wait.
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    if silent:
        lines = []
        for rank in silent:
            last = last_known.get(rank)
            last_text = "never did" if last is None else f"it was last in {last.description}"
            lines.append(f"rank {rank} on {hosts[rank]} does not respond: {last_text}")
        return _diagnosis(silent, lines, answers)

    # All ranks respond: the first difference between their positions names the lagging ranks.
    positions = list(answers.values())
    ranks_outside = [position.rank for position in positions if position.collective is None]
    first_step = min(position.step for position in positions)
    ranks_behind = [position.rank for position in positions if position.step == first_step]
    operations = {position.rank: (position.collective, position.activity) for position in positions}
    (usual_operation, num_usual), *runners_up = Counter(operations.values()).most_common(2)
    is_majority = any(num_usual > num_others for _, num_others in runners_up)
    lagging: list[int] = []
    reason = ""
    if ranks_outside and len(ranks_outside) < len(positions):
        lagging, reason = ranks_outside, "the others wait for it in a collective"
    elif len(ranks_behind) < len(positions):
        lagging, reason = ranks_behind, "the others are in a later step"
    elif is_majority:
        lagging = [rank for rank, operation in operations.items() if operation != usual_operation]
        reason = f"most are in {usual_operation[0]}, {usual_operation[1]}"
    elif len(positions) == 1:
        lagging, reason = [positions[0].rank], "it makes no progress"
    lines = [f"{answers[rank]} ({reason})" for rank in lagging]
    if not lines:
        lines = ["all ranks are at the same position: check the network and the stacks"]
    return _diagnosis(lagging, lines, answers)


def diagnose_alone(position: Position, hosts: Sequence[str]) -> Diagnosis:
    """Return the diagnosis of a rank that cannot reach other ranks because the store is gone."""
    if len(hosts) == 1:
        return diagnose({position.rank: position}, {}, hosts)
    if position.rank == 0:
        line = "the launcher's store does not respond, so rank 0 cannot reach the other ranks"
        return _diagnosis([], [line], {0: position})
    line = f"rank 0 on {hosts[0]} or its store does not respond: ranks cannot reach each other"
    return _diagnosis([0], [line], {position.rank: position})


def _diagnosis(
    lagging_ranks: Sequence[int], lagging_lines: list[str], answers: Mapping[int, Position]
) -> Diagnosis:
    """Return the diagnosis that `lagging_ranks`, described by `lagging_lines`, keep all other ranks
    of `answers` waiting."""
    waiting = [str(answers[rank]) for rank in sorted(answers) if rank not in lagging_ranks]
    # Show few of the waiting ranks, which are in equal positions; there may be thousands.
    waiting_lines = waiting[:_NUM_SHOWN_RANKS]
    if len(waiting) > _NUM_SHOWN_RANKS:
        waiting_lines.append(f"and {len(waiting) - _NUM_SHOWN_RANKS} more")
    text_lines = ["lagging:", *(f"  {line}" for line in lagging_lines)]
    if waiting_lines:
        text_lines += ["waiting:", *(f"  {line}" for line in waiting_lines)]
    return Diagnosis(tuple(sorted(lagging_ranks)), "\n".join(text_lines))
