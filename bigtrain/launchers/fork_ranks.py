"""Ranks that torchrun's agent forks from a process which has imported their libraries already.

The process is Python's own fork server (`multiprocessing.forkserver`). The agent starts it before
its rendezvous; Python starts it again if it has died. It never initializes CUDA, which no forked
process could use: where importing a library did, ranks are started as new processes, as without it.
The kernel kills the fork server with its agent, and the ranks with the fork server.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from bigtrain.system.processes import exit_process

_SET_PARENT_DEATH_SIGNAL, _SET_NAME = 1, 15  # prctl(2)
_NAME_BYTES = 15
FORK_SERVER = "from multiprocessing.forkserver import main"
"""Beginning of the program of Python's fork server."""


def start_fork_server(module: str) -> None:
    """Start the process that ranks are forked from, and wait until it has imported `module`: so an
    agent joins a rendezvous only when its ranks can start at once. Sets environment variables of
    this process, which ranks inherit."""
    # Output like with `python -u`; and without NVML, torch initializes CUDA to count devices.
    os.environ.update(PYTHONUNBUFFERED="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    multiprocessing.set_forkserver_preload([__name__, module])
    # The first process that is forked ends once the fork server has imported the modules.
    first = multiprocessing.get_context("forkserver").Process(target=_nothing)
    first.start()
    first.join()


def _nothing() -> None:
    """Do nothing: the target of a process whose end shows that the fork server can fork."""


def run_rank(module: str, script: str, *arguments: str) -> int:
    """Run ``main(arguments)`` of `module` in this forked process. If the module's
    ``can_be_forked()`` is false, run the equivalent Python file `script` in a new process instead.
    Return 0; end the process with any other exit code."""
    _die_with_parent()
    # Slurm's proctrack/linuxproc neither signals nor ends a process whose name has a space.
    _call_prctl(_SET_NAME, f"rank-{os.environ.get('RANK', '')}".encode()[:_NAME_BYTES])
    # Imported objects are never garbage, so that collections do not copy their pages.
    gc.freeze()
    gc.enable()
    try:
        rank = importlib.import_module(module)
        if rank.can_be_forked():
            code = rank.main(arguments)
        else:
            code = _run_new_process(script, arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code != 0:
        exit_process(code)
    return 0


def _run_new_process(script: str, arguments: Sequence[str]) -> int:
    """Run `script` as a new process, which gets this process's signals; returns its exit code."""
    print("CUDA was initialized by an import, so this rank is a new process", file=sys.stderr)
    command = [sys.executable, "-u", script, *arguments]
    process = subprocess.Popen(command, preexec_fn=_die_with_parent)

    def forward(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux)."""
    parent = os.getppid()
    _call_prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _call_prctl(option: int, value: int | bytes) -> None:
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# Code for the fork server runs when the fork server, which is recognized by its command line,
# imports this module: there is no other way to run code there.
if any(word.startswith(FORK_SERVER) for word in sys.orig_argv) and Path("/proc").exists():
    _die_with_parent()
    gc.disable()
