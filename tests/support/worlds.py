"""Real worlds of gloo processes on this machine, one process group for many cases."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir

from bigtrain.system.local_world import free_port, run_local_world

__all__ = ["ROOT", "default_port", "free_port", "held_ports", "run_world"]

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """So many ports that `free_port` finds taken in every process meanwhile, while a server that
    sets SO_REUSEADDR, as torch's stores do, can listen there: for what begins to listen late."""
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            holder = stack.enter_context(socket.socket())
            try:
                # Without the option, which would let two holders have one port; it is looked at
                # when the server binds.
                holder.bind(("", free_port()))
            except OSError:  # taken since
                continue
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ports.append(holder.getsockname()[1])
        yield ports


@contextmanager
def default_port() -> Iterator[None]:
    """Hold the port that the launcher of DeepSpeed takes where none is named."""
    with open(Path(gettempdir()) / f"bigtrain-default-port-{os.getuid()}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_world(world_size: int, command: list[str], timeout_seconds: int = 900) -> str:
    """Run `command` (arguments to Python) in `world_size` processes; returns their joined output.

    Fails with the output if any process does not exit with 0; none is left behind.
    """
    return run_local_world(world_size, command, {"PYTHONPATH": str(ROOT)}, timeout_seconds)
