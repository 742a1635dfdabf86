"""Leases: which process works on which item, as files in a folder that all processes share.

A lease only avoids duplicate work; it is not a lock: two processes that work on one item
write equal bytes under different names. So losing a lease, or taking one over, is harmless.
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
    """The process that holds a lease. `machine` identifies the boot and the PID namespace;
    `started`, its start time, distinguishes a reused PID."""

    machine: str
    pid: int
    started: str
    token: str

    @classmethod
    def this_process(cls, token: str) -> Owner:
        """Describe this process; `token` is its unique name in file names."""
        return cls(_machine(), os.getpid(), _start_time(os.getpid()) or "", token)

    def is_known_dead(self) -> bool:
        """Return True if the process ran on this machine and has ended; False for a process of
        another machine."""
        is_here = self.machine != "" and self.machine == _machine()
        return is_here and _start_time(self.pid) != self.started


class Leases:
    """The leases in `directory`, as process `token` acquires them.

    `clean(name, token)` is called to remove the unfinished files of a process `token` that died.
    """

    def __init__(self, directory: Path, token: str, clean: Callable[[str, str], None]) -> None:
        self.directory = directory
        self.token = token
        self._clean = clean
        self._owner = json.dumps(asdict(Owner.this_process(token))).encode()

    @contextmanager
    def take(self, name: str) -> Iterator[bool]:
        """Yield whether this process acquired the lease on `name`, renews it during the block, and
        then releases it. Takes over the lease of a dead process, or an expired one."""
        path = self.directory / f"{name}{SUFFIX}"
        is_acquired = self._create(path)
        if not is_acquired:
            state, owner = self._state(path)
            if state == "dead" and owner is not None:
                # A process whose lease merely expired may still need its files.
                path.unlink(missing_ok=True)
                self._clean(name, owner.token)
            elif state != "live":
                path.unlink(missing_ok=True)
            is_acquired = state != "live" and self._create(path)
        if not is_acquired:
            yield False
            return

        # The lease is renewed during the block, by a thread.
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
        """Return whether a process holds a lease on `name` that has not expired."""
        path = self.directory / f"{name}{SUFFIX}"
        if not path.exists():
            return False
        state, _ = self._state(path)
        return state == "live"

    def release(self, tokens: set[str]) -> None:
        """Release the leases of processes `tokens`, which have ended."""
        for path in list(self.directory.glob(f"*{SUFFIX}")):
            owner = _read(path)
            if owner is not None and owner.token in tokens:
                path.unlink(missing_ok=True)
                self._clean(path.name.removesuffix(SUFFIX), owner.token)

    def _create(self, path: Path) -> bool:
        draft = self.directory / f"{path.name}.{self.token}"
        return create_whole(path, self._owner, draft, durable=False)

    def _state(self, path: Path) -> tuple[State, Owner | None]:
        """Return the state of the lease at `path`, and the owner that it names."""
        owner = _read(path)
        if owner is not None and owner.is_known_dead():
            return "dead", owner
        # Both times are of the file system's clock: the clocks of machines may differ.
        clock_file = self.directory / f"clock.{self.token}"
        try:
            clock_file.touch()
            age_s = clock_file.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:  # the lease was released
            return "expired", owner
        finally:
            clock_file.unlink(missing_ok=True)
        return ("expired" if age_s > LEASE_S else "live"), owner


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _keep_alive(path: Path, stop: threading.Event) -> None:
    """Renew the lease at `path` until `stop`."""
    while not stop.wait(HEARTBEAT_S):
        try:
            os.utime(path)
        except FileNotFoundError:
            return  # taken over, or the folder was removed after the last item


def _machine() -> str:
    """Return the boot and the PID namespace of this process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Return the start time of process `pid` of this machine, in clock ticks; None if it does not
    run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Field 3 of proc(5) is the state (a zombie, Z, has ended), field 22 the start time.
    return None if fields[0] in "ZX" else fields[19]
