"""Agreement of all ranks to stop after the same step, for a signal or a write failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import maximum_of_all
from bigtrain.engine.startup.long_work import on_main_rank
from bigtrain.errors import BigtrainError
from bigtrain.run.state import TrainState
from bigtrain.system.stop_signals import StopSignals, ask_for_restart

# Minimum time between two agreements of several ranks. One costs about 0.1 ms on
# one machine, and grows with the logarithm of the world size.
_SECONDS_BETWEEN = 0.5

_TROUBLE = 1 << 16  # above all signals


class StopAgreement:
    """Agreement that stops all ranks after the same step when one received a signal, or the main
    rank can no longer write. `group`: all ranks on the CPU (the training group would wait for a
    GPU); None for one rank. `trouble`: why the main rank must end, or None."""

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
        """Return the signal to stop for, the same on all ranks; call between two steps. Collective.
        Raises the main rank's trouble on all of them."""
        if self._group is None:
            return self._decision(self._own())
        self._steps_left -= 1
        if self._steps_left > 0:
            return None
        step_seconds = (time.perf_counter() - self._since) / self._steps_between
        worst = torch.tensor([self._own(), step_seconds], dtype=torch.float64)
        maximum_of_all(worst, self._group)
        # The same on every rank, like `worst`; at most doubling, if steps become slow.
        wanted = int(_SECONDS_BETWEEN / max(float(worst[1]), 1e-6))
        self._steps_between = max(1, min(wanted, 2 * self._steps_between))
        self._steps_left = self._steps_between
        self._since = time.perf_counter()
        return self._decision(int(worst[0]))

    def _own(self) -> int:
        self._error = self._trouble()
        return _TROUBLE if self._error is not None else self._signals.received

    def _decision(self, number: int) -> signal.Signals | None:
        if number != _TROUBLE:
            return signal.Signals(number) if number else None
        if self._group is None:
            self._raise()
        on_main_rank(self._raise, self._group)
        raise AssertionError("the main rank's failure has disappeared")

    def _raise(self) -> None:
        assert self._error is not None
        raise self._error


def leave_marker(run_directory: Path, received: signal.Signals, state: TrainState) -> None:
    """Request a restart of the run, unless a user stopped it (SIGINT)."""
    if received != signal.SIGINT:
        ask_for_restart(run_directory, received.name, state.step)
