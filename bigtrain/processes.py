"""How processes that train begin and end: what takes seconds there, or ends them wrongly. Pure.

Measured with torch 2.13, transformers 5.23 and deepspeed 0.19.8: of 7.1 CPU seconds from start to
end the collector takes 1.0 and unloading 2.0.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries inside: what they make stays, so that the garbage collector need not
    look through it, neither now nor at each of its full rounds during training."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def leave(status: int) -> NoReturn:
    """End this process with exit code `status`, without unloading Python.

    Threads are waited for, what `atexit` knows is called, and streams are flushed, as always. But
    process groups live on after `destroy_process_group` where DeepSpeed still refers to them, and
    a thread of theirs that lets go of a tensor while Python is unloaded ends the process with
    SIGABRT ("terminate called without an active exception"), and so a run that has succeeded.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its processes
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(status)
