"""Signals that ask a run to stop, from the first line of its program on. Pure.

SIGTERM and SIGUSR1 come from schedulers and launchers before they take the machine away: the run
leaves a marker, ``RUN/requeue``, and whoever started it may start it again. SIGINT comes from a
person: no marker. Either way the exit code is `EXIT_STOPPED`; but launchers end with codes of their
own, which is why there is a marker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from bigtrain.errors import EXIT_STOPPED

REQUEUE = "requeue"
"""Marker in a run directory: stopped by SIGTERM or SIGUSR1 before its end, with nothing lost."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Launchers send a second and a third signal as they go down, so only a person who insists is
# believed: the fourth SIGINT does what the first would have done without all this.
_PATIENCE = 3


class StopSignals:
    """The first signal this process got; the ones after it change nothing.

    Signals are only noted (`listen`), or end the process at once (`leave_by`). A context manager,
    which puts the handlers of before back on leaving. One at a time in a process.
    """

    def __init__(self) -> None:
        self.received = 0
        self._num_interrupts = 0
        self._before: dict[signal.Signals, Any] = {}
        self._action: Callable[[signal.Signals], None] | None = None
        self._lock = threading.Lock()
        self._pipe: int | None = None
        self._wakeup_before = -1

    def listen(self) -> None:
        """Only note signals from now on: this process asks for them (`received`), or is ending."""
        with self._lock:
            self._action = None
        self._install()

    def leave_by(self, action: Callable[[signal.Signals], None]) -> None:
        """At a signal from now on, or one that came before, do `action` and end by EXIT_STOPPED.

        For times when there is nothing to save. `action` runs in a thread, for the main one may be
        in C code, waiting for ranks that do not start.
        """
        self._install()
        with self._lock:
            self._action = action
            if self.received:
                self._leave(self.received)

    def restore(self) -> None:
        """Put the handlers of before back. May be called again."""
        while self._before:
            number, handler = self._before.popitem()
            # None: of a handler that was not made in Python.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe)
            self._pipe = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _install(self) -> None:
        # Python asks for the main thread.
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # Written by Python's handler in C, whatever the main thread does.
        self._wakeup_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True).start()
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > _PATIENCE:
            raise KeyboardInterrupt

    def _watch(self, reading: int) -> None:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                with self._lock:
                    if self._action is not None and number[0] in SIGNALS:
                        self._leave(number[0])

    def _leave(self, number: int) -> None:
        """Under the lock, so that the run cannot begin to write meanwhile."""
        assert self._action is not None
        with suppress(Exception):  # a disk that is full, say; this process ends in any case
            self._action(signal.Signals(number))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(EXIT_STOPPED)


def ask_for_restart(run_directory: Path, reason: str, step: int | None) -> None:
    """Leave the marker that Slurm scripts go by: each by that of its own start alone.

    `step`: None where the run had not begun. A node that was cut off may come back when a later
    start has been cancelled.
    """
    marker: dict[str, Any] = {"signal": reason, "step": step}
    if "SLURM_JOB_ID" in os.environ:
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        marker["start"] = f"{os.environ['SLURM_JOB_ID']}-{restart}"
    run_directory.mkdir(parents=True, exist_ok=True)
    (run_directory / REQUEUE).write_text(json.dumps(marker) + "\n")
