"""Processes of tests that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1  # Linux's prctl(2)


def lasting_parent() -> int:
    """Return this process for `die_with_parent` of a process started here; 0 in a thread, at whose
    end the kernel would already kill it."""
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when `parent`, its parent, ends; not if it is 0.

    A test that is interrupted closes nothing. fork clears the setting, so a forked child calls
    this again; exec keeps it.
    """
    if not parent:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
