"""torchrun wrapper with a one-line message on the end of the launch and the exit code of its ranks.

    python -m bigtrain.launchers.agent [--fork MODULE] TORCHRUN-ARGUMENTS

`--fork` forks ranks from a process that has imported MODULE (`bigtrain.launchers.fork_ranks`); the
script is started only where that is impossible.

torchrun itself (2.13) ends with a traceback and exit code 1, regardless of the exit codes of its
ranks (so a preempted run looks like a failed one), and it kills them 30 seconds after SIGTERM, even
while they save. If it restarts nothing (``--max-restarts=0``, its default), SIGTERM is forwarded to
the ranks instead, and the agent waits until they exit. With ``--rdzv-backend=bigtrain`` hosts that
are lost are noticed and replaced as `bigtrain.launchers.elastic_patches` documents.

The end of a launch is often the end of its container or job, and so of all its processes: the agent
waits a moment for the watcher of the callback `webhook` to send its message.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from bigtrain.errors import EXIT_FAULTY_HOST, EXIT_STOPPED
from bigtrain.launchers.fork_ranks import FORK_SERVER, run_rank, start_fork_server

WATCHER = "webhook_watcher.py"
"""File of a program that a rank starts, and that outlives it (`bigtrain.run.shipped`)."""
_WATCHER_SECONDS = 15.0
_SET_CHILD_SUBREAPER = 36  # prctl(2)


def main(arguments: Sequence[str]) -> int:
    """Launch and return the exit code of the rank that failed first, or 2."""
    with suppress(OSError, AttributeError):  # orphans of this launch become children of the agent
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        return _launch(arguments)
    finally:
        # Watchers of this launch may have to send a last message: wait, for a limited time.
        ends_at = time.monotonic() + _WATCHER_SECONDS
        while time.monotonic() < ends_at:
            commands = [_read(pid, "cmdline") for pid in _children(os.getpid())]
            if not any(WATCHER.encode() in command for command in commands):
                break
            time.sleep(0.05)


def _launch(arguments: Sequence[str]) -> int:
    """Run torchrun; print a line on how it ended, and return the exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousTimeoutError,
    )

    module = None
    if arguments[:1] == ["--fork"]:
        module, arguments = arguments[1], arguments[2:]
    options = run.parse_args(list(arguments))
    from bigtrain.launchers import agent_patches, elastic_patches

    agent_patches.install()
    # Not the thirty lines of torch's traceback when a rank fails: a line below reports it.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    if options.max_restarts == 0:  # otherwise torchrun would restart ranks that saved and exited
        options.signals_to_handle = "SIGINT"
        signal.signal(signal.SIGTERM, _forward)
    # Run, and report how the launch ended in one line.
    try:
        if module is None:
            run.run(options)
        else:
            _run_forked(module, options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        cause = f"exit code {code}" if code >= 0 else f"signal {-code}"
        verb = "stopped" if code == EXIT_STOPPED else "failed"
        _say(f"rank {rank} {verb} first, with {cause}; its output is above")
        return code if code >= 0 else 128 - code
    except SignalException as error:
        _say(f"ended by {error.sigval.name}, which was sent to its ranks too: see their output")
        return 128 + int(error.sigval)
    except RendezvousClosedError:
        _say(
            f"the launch {options.rdzv_id} at the rendezvous {options.rdzv_endpoint} has ended, so "
            "this node cannot join it -> if the run is not complete, stop the process that serves "
            "the rendezvous, and restart it and all nodes"
        )
        return 2
    except elastic_patches.FaultyNodeError as error:
        _say(f"{error} -> test it (bigtrain doctor) before it takes part in any run again")
        return EXIT_FAULTY_HOST
    except elastic_patches.TooManyHostsError as error:
        _say(
            f"{error} -> start this node when one is lost, or write the script with more --nodes "
            "or --spares"
        )
        return 2
    except RendezvousTimeoutError:
        _say("fewer nodes joined than the run needs -> start more nodes, or give it spares")
        return EXIT_STOPPED if options.rdzv_backend == elastic_patches.BACKEND else 2
    except RendezvousError as error:
        _say(f"no rendezvous at {options.rdzv_endpoint}: {error} -> check that it is served there")
        return 2
    return 0


def _run_forked(module: str, options: argparse.Namespace) -> None:
    """Run as torchrun does, but fork ranks from a process that has imported `module`."""
    from torch.distributed import run

    # Else forked ranks, which start fast, read the addresses of earlier ranks in a shared store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    start_fork_server(module)
    if options.standalone:  # as torchrun itself replaces it
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        options.rdzv_id = str(uuid.uuid4())
    options.start_method = "forkserver"
    config, _, _ = run.config_from_args(options)
    launch = run.elastic_launch(config=config, entrypoint=run_rank)
    launch(module, options.training_script, *options.training_script_args)


def _forward(number: int, frame: FrameType | None) -> None:
    """Send the signal to the ranks: they save and exit, then torchrun exits. Before ranks have
    started, exit at once: there is nothing to save."""
    # Ranks are children of the agent, or of the agent's fork server.
    children = _children(os.getpid())
    ranks = [pid for pid in children if b"\0RANK=" in b"\0" + _read(pid, "environ")]
    for pid in children:
        if FORK_SERVER.encode() in _read(pid, "cmdline"):
            ranks += _children(pid)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    if not ranks:
        sys.exit(128 + number)


def _children(parent: int) -> list[int]:
    """Return the ids of the child processes of `parent`."""
    children = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ValueError, IndexError):  # the process has ended
            pid = int(folder.name)
            # After the name in parentheses: the state, then the parent.
            fields = _read(pid, "stat").decode().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                children.append(pid)
    return children


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; empty if the process has ended. A zombie has an empty
    ``cmdline``."""
    with suppress(OSError):
        return Path("/proc", str(pid), name).read_bytes()
    return b""


def _say(text: str) -> None:
    print(f"torchrun: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
