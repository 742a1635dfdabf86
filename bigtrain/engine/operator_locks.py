"""Locks of the compiler of DeepSpeed's operators, some of which outlive who made them.

torch 2.13, utils/file_baton.py and cpp_extension.py: who compiles an operator makes a file named
`lock` in its folder, and every other process that needs it waits until the file is gone. Where the
maker was killed that is for ever, in silence, for every later run on the same home directory.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from glob import iglob
from pathlib import Path

import torch

from bigtrain.errors import LaunchError

log = logging.getLogger(__name__)

ABANDONED_AFTER_SECONDS = 600.0
"""Without a change in the folder: a compiler on another host, unseen, writes a file within that."""
_LOOK_EVERY_SECONDS = 0.5
_SAY_AFTER_SECONDS = 30.0


def wait_for_operator_locks() -> None:
    """Return once no operator is being compiled. Not collective; comes before any process group.

    Raises LaunchError naming a lock that no process of this host holds, and in whose folder nothing
    has changed for ten minutes.
    """
    began, told = time.monotonic(), False
    while locks := sorted(operators_folder().glob("*/lock")):
        for lock in locks:
            _refuse_abandoned(lock)
        if not told and time.monotonic() - began > _SAY_AFTER_SECONDS:
            log.warning("waiting: somebody compiles an operator of DeepSpeed's, see %s", locks[0])
            told = True
        time.sleep(_LOOK_EVERY_SECONDS)


def operators_folder() -> Path:
    """Of what torch compiles, with a folder each (cpp_extension.py, `_get_build_directory`)."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    if torch.version.hip is not None:
        device = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        device = f"cu{torch.version.cuda.replace('.', '')}"
    else:
        device = "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(cache) / "torch_extensions" / f"{python}_{device}"


def _refuse_abandoned(lock: Path) -> None:
    try:
        changed = max(path.lstat().st_mtime for path in lock.parent.iterdir())
        found = lock.lstat()
    except (OSError, ValueError):  # gone meanwhile
        return
    seconds = time.time() - changed
    if seconds < ABANDONED_AFTER_SECONDS or _is_held(found):
        return
    raise LaunchError(
        f"{lock}: who made it was killed while it compiled an operator of DeepSpeed's (no process "
        "of this host holds it, and nothing has changed beside it for "
        f"{seconds / 60:.0f} minutes); every run would wait for its end -> rm {lock}"
    )


def _is_held(lock: os.stat_result) -> bool:
    """Whether a process of this host, as far as this one may see, has the file open."""
    for descriptor in iglob("/proc/[0-9]*/fd/*"):  # passes over what may not be listed
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.stat(descriptor), lock):
                return True
    return False
