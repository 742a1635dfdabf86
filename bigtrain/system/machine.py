"""Cores and memory of the machine that this process may use. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
UNLIMITED_BYTES = 1 << 62
"""Used if the memory size is unknown, so that it is not a limit."""


@dataclass(frozen=True)
class Machine:
    """Cores and free memory that this process may use."""

    num_cores: int
    memory_bytes: int


def this_machine(environment: Mapping[str, str], root: Path = ROOT) -> Machine:
    """Return cores and memory within the CPU affinity and the cgroup (version 2) limits of this
    process.

    Divided by LOCAL_WORLD_SIZE where torchrun started several processes on this host.
    """
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    memory = available_memory_bytes(root) or UNLIMITED_BYTES
    for limit in _control_group("cpu.max", root):
        quota, _, period = limit.partition(" ")
        if quota != "max":
            num_cores = min(num_cores, int(quota) // int(period))
    for limit in _control_group("memory.max", root):
        if limit != "max":
            memory = min(memory, int(limit))
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    parts = max(1, int(local)) if local.isdecimal() else 1
    return Machine(max(1, num_cores // parts), memory // parts)


def available_memory_bytes(root: Path = ROOT) -> int | None:
    """Return Linux's MemAvailable; None on another system."""
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _control_group(name: str, root: Path) -> Iterator[str]:
    """Yield the contents of file `name` in this process's cgroup, and in each of its parents."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if not line.startswith("0::"):
                continue
            group = Path(line.removeprefix("0::/"))
            for level in (group, *group.parents):
                with suppress(OSError):
                    yield (root / "sys/fs/cgroup" / level / name).read_text().strip()
