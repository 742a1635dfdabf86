"""Signals that ask a run to save and end at the next step boundary.

SIGTERM and SIGUSR1 come from schedulers and launchers before they take the machine away: the run
leaves a marker, ``RUN/requeue``, and whoever started it may start it again. SIGINT comes from a
person: no marker. Either way the exit code is `EXIT_STOPPED`; but launchers end with codes of their
own, which is why there is a marker.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from bigtrain.errors import BigtrainError
from bigtrain.run.state import TrainState

REQUEUE = "requeue"
"""Marker in a run directory: stopped by SIGTERM or SIGUSR1 before its end, and saved."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Launchers send a second and a third signal as they go down, so only a person who insists is
# believed: the fourth SIGINT does what the first would have done without all this.
_PATIENCE = 3

# Between two agreements of several processes, where steps are shorter. One costs about 0.1 ms on
# one machine and grows with the number of processes.
_SECONDS_BETWEEN = 0.5

_TROUBLE = 1 << 16  # above all signals


class StopSignals:
    """The first signal this process got while it listened; the ones after it change nothing.

    A context manager, which puts the handlers of before back on leaving.
    """

    def __init__(self) -> None:
        self.received = 0
        self._num_interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Catch `SIGNALS` from now on; before, with nothing to save, they end the process."""
        if threading.current_thread() is threading.main_thread():  # Python asks for that
            for number in SIGNALS:
                self._before.setdefault(number, signal.signal(number, self._handle))

    def restore(self) -> None:
        """Put the handlers of before back. May be called again."""
        while self._before:
            number, handler = self._before.popitem()
            # None: of a handler that was not made in Python.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > _PATIENCE:
            raise KeyboardInterrupt


class StopAgreement:
    """Makes all processes stop after the same step, whichever of them got a signal, and when the
    main one finds that nothing can be written any more.

    Parameters: `group`, of all processes on the CPU, for in the training group this would wait for
    a GPU at every step; None for one process. `trouble`: of the main process, why it must end.
    """

    def __init__(
        self,
        signals: StopSignals,
        group: dist.ProcessGroup | None,
        trouble: Callable[[], BigtrainError | None] = lambda: None,
    ) -> None:
        self._signals = signals
        self._trouble = trouble
        self._group = group
        self._error: BigtrainError | None = None
        self._steps_between = self._steps_left = 1
        self._since = time.perf_counter()

    def agreed(self) -> signal.Signals | None:
        """Between two steps: the signal to stop for. Collective, and the same on all processes.

        Raises the main process's trouble on all of them.
        """
        if self._group is None:
            return self._verdict(self._own())
        self._steps_left -= 1
        if self._steps_left > 0:
            return None
        step_seconds = (time.perf_counter() - self._since) / self._steps_between
        worst = torch.tensor([self._own(), step_seconds], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._group)
        # The same on every process, as `worst` is; doubling at most, should steps become slow.
        wanted = int(_SECONDS_BETWEEN / max(float(worst[1]), 1e-6))
        self._steps_between = max(1, min(wanted, 2 * self._steps_between))
        self._steps_left = self._steps_between
        self._since = time.perf_counter()
        return self._verdict(int(worst[0]))

    def _own(self) -> int:
        self._error = self._trouble()
        return _TROUBLE if self._error is not None else self._signals.received

    def _verdict(self, number: int) -> signal.Signals | None:
        if number != _TROUBLE:
            return signal.Signals(number) if number else None
        error = [self._error]
        if self._group is not None:
            dist.broadcast_object_list(error, src=0, group=self._group)
        assert error[0] is not None
        raise error[0]


def leave_marker(run_directory: Path, received: signal.Signals, state: TrainState) -> None:
    """Ask for the run to be started again, unless it was a person who stopped it."""
    if received != signal.SIGINT:
        ask_for_restart(run_directory, received.name, state.step)


def ask_for_restart(run_directory: Path, reason: str, step: int) -> None:
    """Leave the marker that Slurm scripts go by: each by that of its own start alone.

    A node that was cut off may come back when a later start has been cancelled.
    """
    marker: dict[str, Any] = {"signal": reason, "step": step}
    if "SLURM_JOB_ID" in os.environ:
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        marker["start"] = f"{os.environ['SLURM_JOB_ID']}-{restart}"
    (run_directory / REQUEUE).write_text(json.dumps(marker) + "\n")
