"""torchrun as process 1 of a pod: it hands SIGTERM on, waits for the save, and ends as it did.

    python -m bigtrain.launch.agent [OPTIONS OF TORCHRUN] bigtrain/train.py --config RUN.yaml

torchrun itself (2.13) kills its processes 30 seconds after SIGTERM, whatever they are saving, and
ends with 1 whatever they end with, so that nobody can tell a preempted run from one that failed.
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
    """Run torchrun with `arguments`; returns the exit code of the first process that failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    signal.signal(signal.SIGTERM, _hand_on)
    try:
        torchrun(["--signals-to-handle=SIGINT", *arguments])
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
