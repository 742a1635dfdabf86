"""Processes of tests that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # Linux's prctl(2)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when `parent`, its parent, ends.

    A test that is interrupted closes nothing. fork clears the setting, so a forked child calls
    this again; exec keeps it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
