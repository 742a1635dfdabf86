"""torchrun, which says in plain words how a launch ended, and ends with its processes' exit code.

    python -m bigtrain.launchers.agent TORCHRUN-ARGUMENTS

torchrun itself (2.13) ends by a traceback and exit code 1, whatever its processes end with, so that
nobody can tell a preempted run from one that failed; and it kills them 30 seconds after SIGTERM,
whatever they are saving. Where it starts nothing again (``--max-restarts=0``, its default) SIGTERM
is handed on to the processes instead, and their end waited for.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType


def main(arguments: Sequence[str]) -> int:
    """Launch, and return the exit code: that of the process that failed first, or 2."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError

    options = run.parse_args(list(arguments))
    if options.max_restarts == 0:  # else it would start processes that have saved and ended again
        options.signals_to_handle = "SIGINT"
        signal.signal(signal.SIGTERM, _hand_on)
    try:
        run.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = int(failure.exitcode)
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        _say(f"process {rank} ended first, with {how}; what it said stands above")
        return code if code >= 0 else 128 - code
    except SignalException as error:
        _say(f"ended by {error.sigval.name}, which its processes got too: they say what they did")
        return 128 + int(error.sigval)
    except RendezvousClosedError:
        _say(
            f"the launch {options.rdzv_id} that met at {options.rdzv_endpoint} has ended, so this "
            "node cannot join it -> if the run is not complete, end whatever serves there, and "
            "start it and all nodes anew"
        )
        return 2
    except RendezvousError as error:
        _say(f"no meeting at {options.rdzv_endpoint}: {error} -> is it served there?")
        return 2
    return 0


def _hand_on(number: int, frame: FrameType | None) -> None:
    """They save and end, and then torchrun does. Where there are none yet, nothing is to save."""
    started = _ranks()
    for process in started:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    if not started:
        sys.exit(128 + number)


def _ranks() -> list[int]:
    """The processes that torchrun has started here."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"\0RANK=" in b"\0" + (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return found


def _say(text: str) -> None:
    print(f"torchrun: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
