"""Leases: who works on what, told by files in a folder that all processes see.

A claim saves work, it guards nothing: two processes that work on the same thing write the same
bytes under names of their own. So a claim may be lost or taken over without harm.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bigtrain.system.files import create_whole

LEASE_S = 120.0
HEARTBEAT_S = 15.0
SUFFIX = ".claim"

State = Literal["live", "dead", "expired"]


@dataclass(frozen=True)
class Owner:
    """A process: `machine` tells boots and process namespaces apart, `started` reused numbers."""

    machine: str
    pid: int
    started: str
    token: str

    @classmethod
    def this_process(cls, token: str) -> Owner:
        """`token` names this process in file names; no other process has the same."""
        return cls(_machine(), os.getpid(), _start_time(os.getpid()) or "", token)

    def is_known_dead(self) -> bool:
        """Whether it ran here and has ended; False for a process elsewhere."""
        return "" != self.machine == _machine() and _start_time(self.pid) != self.started


class Leases:
    """The leases in `directory`, made by process `token`.

    `clean(name, token)` is called for what process `token` left unfinished when it died.
    """

    def __init__(self, directory: Path, token: str, clean: Callable[[str, str], None]) -> None:
        self.directory = directory
        self.token = token
        self._clean = clean
        self._owner = json.dumps(asdict(Owner.this_process(token))).encode()

    @contextmanager
    def take(self, name: str) -> Iterator[bool]:
        """Whether `name` is this process's for the block; kept alive meanwhile, then given up.

        Takes over what belongs to a dead process.
        """
        path = self._path(name)
        if not (self._create(path) or (self._clear_if_abandoned(path) and self._create(path))):
            yield False
            return
        stop = threading.Event()
        heart = threading.Thread(target=_keep_alive, args=(path, stop), daemon=True)
        heart.start()
        try:
            yield True
        finally:
            stop.set()
            heart.join()
            path.unlink(missing_ok=True)

    def is_live(self, name: str) -> bool:
        """Whether somebody works on `name`, as far as can be told."""
        path = self._path(name)
        return path.exists() and self._state(path)[0] == "live"

    def release(self, tokens: set[str]) -> None:
        """Give up the leases of processes that have ended, of which the caller knows."""
        for path in list(self.directory.glob(f"*{SUFFIX}")):
            owner = _read(path)
            if owner is not None and owner.token in tokens:
                path.unlink(missing_ok=True)
                self._clean(path.name.removesuffix(SUFFIX), owner.token)

    def _create(self, path: Path) -> bool:
        draft = self.directory / f"{path.name}.{self.token}"
        return create_whole(path, self._owner, draft, durable=False)

    def _clear_if_abandoned(self, path: Path) -> bool:
        state, owner = self._state(path)
        if state == "live":
            return False
        path.unlink(missing_ok=True)
        if state == "dead" and owner is not None:
            # Not of one that only seems dead: it would find its files gone when it goes on.
            self._clean(path.name.removesuffix(SUFFIX), owner.token)
        return True

    def _state(self, path: Path) -> tuple[State, Owner | None]:
        owner = _read(path)
        if owner is not None and owner.is_known_dead():
            return "dead", owner
        try:
            age_s = self._file_system_time() - path.stat().st_mtime
        except FileNotFoundError:
            return "expired", owner
        return ("expired" if age_s > LEASE_S else "live"), owner

    def _file_system_time(self) -> float:
        """Now by the clock that gives files their times: machines may not agree on theirs."""
        clock = self.directory / f"clock.{self.token}"
        clock.touch()
        try:
            return clock.stat().st_mtime
        finally:
            clock.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{SUFFIX}"


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _keep_alive(path: Path, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        try:
            os.utime(path)
        except FileNotFoundError:
            return  # taken over, or all is finished


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """When process `pid` of this machine started, in clock ticks; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # State Z: it has ended and only its parent has not looked yet.
    return None if fields[0] in "ZX" else fields[19]
