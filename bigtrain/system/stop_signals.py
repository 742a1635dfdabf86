"""Signals that ask a run to stop, handled from the first line of the program on. Pure.

Schedulers and launchers send SIGTERM or SIGUSR1 before they reclaim the machine: the run leaves a
marker, ``RUN/requeue``, which requests a restart. SIGINT comes from a person and
leaves no marker. The exit code is `EXIT_STOPPED` in both cases; the marker exists because launchers
exit with other codes.
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
"""Marker in a run directory: stopped early by SIGTERM or SIGUSR1, with nothing lost."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Launchers send a second and a third SIGINT as they shut down, so only the fourth one raises
# KeyboardInterrupt.
_IGNORED_INTERRUPTS = 3


class StopSignals:
    """Recorder of the first stop signal that this process receives; later ones are ignored.

    Signals are only recorded (`listen`), or end the process at once (`exit_after`). A context
    manager, which restores the previous handlers on exit. One at a time in a process.

    `interrupts`: the process is not the run's own, but an interpreter or a notebook: SIGINT raises
    KeyboardInterrupt in the main thread instead of ending the process.
    """

    def __init__(self, *, interrupts: bool = False) -> None:
        self.received = 0
        self._interrupts = interrupts
        self._num_interrupts = 0
        self._before: dict[signal.Signals, Any] = {}
        self._action: Callable[[signal.Signals], None] | None = None
        self._lock = threading.Lock()
        self._pipe: int | None = None
        self._wakeup_before = -1

    def listen(self) -> None:
        """Only record signals in `received` from now on."""
        with self._lock:
            self._action = None
        self._install()

    def exit_after(self, action: Callable[[signal.Signals], None]) -> None:
        """Run `action` and exit with EXIT_STOPPED at the next signal, or now if one was received.

        For phases in which there is nothing to save. `action` runs in a thread, since the main
        thread may be in C code, waiting for ranks that never join.
        """
        self._install()
        with self._lock:
            self._action = action
            if self.received and not self._is_interrupt(self.received):
                self._exit(self.received)
        if self._is_interrupt(self.received):
            self._act_and_interrupt()

    def restore(self) -> None:
        """Restore the previous handlers. May be called again."""
        while self._before:
            number, handler = self._before.popitem()
            # None: the previous handler was not installed from Python.
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
        """Install the handlers, and a thread that sees signals while the main thread is busy."""
        # Python installs handlers in the main thread only.
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        # Python's C-level handler writes the signal to the pipe even if the main thread is busy.
        self._wakeup_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), name="signals", daemon=True).start()
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, in the main thread."""
        self.received = self.received or number
        self._num_interrupts += number == signal.SIGINT
        if self._is_interrupt(number) and self._action is not None:
            self._act_and_interrupt()
        if self._num_interrupts > _IGNORED_INTERRUPTS:
            raise KeyboardInterrupt

    def _is_interrupt(self, number: int) -> bool:
        """Return whether a signal raises KeyboardInterrupt instead of ending the process."""
        return self._interrupts and number == signal.SIGINT

    def _act_and_interrupt(self) -> None:
        """Run the action once and raise KeyboardInterrupt, in the main thread."""
        action, self._action = self._action, None
        if action is not None:
            with suppress(Exception):
                action(signal.SIGINT)
        raise KeyboardInterrupt

    def _watch(self, reading: int) -> None:
        """Exit at a signal after `exit_after`, also while the main thread is busy."""
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while signal_byte := pipe.read(1):  # empty once `restore` has closed the pipe
                number = signal_byte[0]
                with self._lock:
                    ends_process = number in SIGNALS and not self._is_interrupt(number)
                    if self._action is not None and ends_process:
                        self._exit(number)

    def _exit(self, number: int) -> None:
        """Exit. The caller holds the lock, so that the run cannot start to write in the
        meantime."""
        assert self._action is not None
        with suppress(Exception):  # e.g. a full disk; this process exits in any case
            self._action(signal.Signals(number))
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(EXIT_STOPPED)


def ask_for_restart(run_directory: Path, reason: str, step: int | None) -> None:
    """Write the requeue marker, by which a Slurm script requeues its job.

    `step`: None if training had not begun. The marker names the launch that wrote it, and a script
    accepts the marker of its launch only: a detached node may return after a later launch was
    cancelled.
    """
    marker: dict[str, Any] = {"signal": reason, "step": step}
    if "SLURM_JOB_ID" in os.environ:
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        marker["start"] = f"{os.environ['SLURM_JOB_ID']}-{restart}"
    run_directory.mkdir(parents=True, exist_ok=True)
    (run_directory / REQUEUE).write_text(json.dumps(marker) + "\n")
