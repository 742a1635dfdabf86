"""A forked process as one of a host of its own: another host name, and its own shared memory."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

_NEW_MOUNTS, _NEW_NAMES = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS of unshare(2)
_BIND, _PRIVATE = 0x1000, 0x4000 | 1 << 18  # MS_BIND, MS_REC | MS_PRIVATE of mount(2)


def why_no_hosts() -> str | None:
    """Return why processes cannot have hosts of their own; None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    return None if Path("/dev/shm").is_dir() else "this machine has no /dev/shm"


def enter_host(name: str, memory: str, mount: str) -> None:
    """Move this process to the host `name`, where the directory `mount` is the directory
    `memory`."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *args: object) -> None:
        if getattr(libc, function)(*args):
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")

    call("unshare", _NEW_MOUNTS | _NEW_NAMES)
    call("mount", b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None)
    call("mount", memory.encode(), mount.encode(), None, ctypes.c_ulong(_BIND), None)
    socket.sethostname(name)


def take_host(rank: int, size: int, names: list[str], memory: list[str], mount: str) -> None:
    """Move this process to its host, of which it is one of the local ranks: `size` ranks are
    divided among the hosts `names`, with the directories `memory`."""
    number, local_rank = divmod(rank, size // len(names))
    enter_host(names[number], memory[number], mount)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(size // len(names)))
