"""Check of ``checkpoint.memory.directory`` on this host, and of the free space. Torch-free."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bigtrain.errors import Problem
from bigtrain.planner.run_prediction import RunPrediction
from bigtrain.settings.run_config import MemoryCheckpointSection, RunConfig
from bigtrain.system.units import GIB

KEY = "checkpoint.memory.directory"

SPARE_BYTES = 64 << 20
"""Bytes of the file system that checkpoints leave to other programs (NCCL, data loaders)."""

_IN_MEMORY = ("tmpfs", "ramfs")


def check_memory_directory(config: RunConfig) -> Sequence[Problem]:
    """Return problems of ``checkpoint.memory.directory`` on this host."""
    section = config.checkpoint.memory
    if section is None:
        return []
    directory = Path(section.directory)
    remedy = "a file system in memory, as /dev/shm, or checkpoint.memory=null"
    rule, file_system = None, _file_system(directory)
    if not directory.is_dir():
        rule = "is not a directory of this host"
    elif file_system is not None and file_system not in _IN_MEMORY:
        rule = f"is on a disk ({file_system}), not in memory"
    elif not os.access(directory, os.W_OK | os.X_OK):
        rule = "cannot be written by this user"
    return [] if rule is None else [Problem(KEY, section.directory, rule, remedy)]


def _file_system(directory: Path) -> str | None:
    """Return the type of the file system of `directory`; None where the system does not report
    it."""
    with suppress(OSError, ValueError, IndexError):
        path, file_system = directory.resolve(), None
        most_parts = -1
        for line in Path("/proc/self/mounts").read_text().splitlines():
            escaped_path, mount_type = line.split()[1:3]
            # Spaces of a path are written as the octal code \040.
            mount = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), escaped_path))
            # The deepest mount holds `directory`; of several at one path, the last is visible.
            if path.is_relative_to(mount) and len(mount.parts) >= most_parts:
                most_parts, file_system = len(mount.parts), mount_type
        return file_system
    return None


def size_line(section: MemoryCheckpointSection, bytes_per_rank: float, num_ranks: int = 1) -> str:
    """Return a line that compares what checkpoints in memory take with this host's file system.
    bytes_per_rank: of all copies of a rank's part in the directory."""
    total_bytes, _, free_bytes = shutil.disk_usage(section.directory)
    needed_bytes = bytes_per_rank * num_ranks
    ranks = "one rank" if num_ranks == 1 else f"{num_ranks} ranks"
    line = f"checkpoints in memory: {needed_bytes / GIB:.3g} GiB for {ranks} of a host in "
    line += f"{section.directory}, which has {free_bytes / GIB:.3g} of {total_bytes / GIB:.3g} "
    line += "GiB free here"
    if needed_bytes + SPARE_BYTES > free_bytes:
        line += ": too small, so only those on disk will be written"
    return line


def memory_lines(
    prediction: RunPrediction, section: MemoryCheckpointSection, num_ranks: int = 1
) -> list[str]:
    """Return lines on the predicted space of checkpoints in memory, for `num_ranks` ranks of this
    host, and on the predicted time, if the device is known."""
    costs = prediction.memory_checkpoints
    assert costs is not None
    lines = [size_line(section, costs.directory_bytes, num_ranks)]
    return lines if prediction.time is None else lines + costs.lines(prediction.time.total)
