"""Agreement between ranks to stop or save after one common step: a signal, a write failure, an
error or a request of a callback."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import maximum_of_all
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.errors import BigtrainError
from bigtrain.run.state import TrainState
from bigtrain.system.stop_signals import StopSignals, ask_for_restart

# Minimum time between two agreements of several ranks. One costs about 0.1 ms on
# one machine, and grows with the logarithm of the world size.
_SECONDS_BETWEEN = 0.5

_ERROR_NUMBER = 1 << 16  # above all signals


@dataclass(frozen=True)
class Agreed:
    """Result of an agreement, equal on all ranks. signal: to stop for, with the run to be continued
    later. ends, saves: whether a callback asked to end the run, and for a checkpoint."""

    signal: signal.Signals | None = None
    ends: bool = False
    saves: bool = False

    def __or__(self, decision: Agreed) -> Agreed:
        return Agreed(
            self.signal or decision.signal,
            self.ends or decision.ends,
            self.saves or decision.saves,
        )


class StopAgreement:
    """Agreement that stops all ranks after one common step when a rank received a signal, or must
    end. `group`: all ranks on the CPU (the training group would wait for a GPU); None for one rank.
    `trouble`: returns the error for which this rank must end, or None. `requests`: returns whether
    callbacks of this rank asked to end the run, and to save; with `requests` ranks agree after
    every step, otherwise at most twice a second."""

    def __init__(
        self,
        signals: StopSignals,
        group: dist.ProcessGroup | None,
        trouble: Callable[[], BigtrainError | None] = lambda: None,
        requests: Callable[[], tuple[bool, bool]] | None = None,
    ) -> None:
        self._signals = signals
        self._trouble = trouble
        self._requests = requests
        self._group = group
        self._error: BigtrainError | None = None
        self._steps_between = self._steps_left = 1
        self._since = time.perf_counter()

    def agreed(self) -> Agreed:
        """Return the decision after this step, equal on all ranks; call between two steps.
        Collective. Raises the trouble of a rank on all ranks."""
        step_seconds = 0.0
        if self._group is not None:
            self._steps_left -= 1
            if self._steps_left > 0 and self._requests is None:
                return Agreed()
            step_seconds = (time.perf_counter() - self._since) / self._steps_between
        # 0: no signal and no error.
        self._error = self._trouble()
        number = int(_ERROR_NUMBER if self._error is not None else self._signals.received)
        ends, saves = (False, False) if self._requests is None else self._requests()

        if self._group is not None:
            # The maximum: an error of any rank, else the highest signal; requests of any rank.
            values = torch.tensor([number, step_seconds, ends, saves], dtype=torch.float64)
            maximum_of_all(values, self._group)
            number, ends, saves = int(values[0]), bool(values[2]), bool(values[3])
            # The number of steps until the next agreement is equal on every rank, as `values` are.
            # It at most doubles, in case later steps are slower.
            steps_between = int(_SECONDS_BETWEEN / max(float(values[1]), 1e-6))
            self._steps_between = max(1, min(steps_between, 2 * self._steps_between))
            self._steps_left = self._steps_between
            self._since = time.perf_counter()

        if number != _ERROR_NUMBER:
            return Agreed(signal.Signals(number) if number else None, ends, saves)
        if self._group is None:
            self._raise()
        on_all_ranks(self._raise, self._group)
        raise AssertionError("the failure has disappeared")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def leave_marker(run_directory: Path, received: signal.Signals, state: TrainState) -> None:
    """Request a restart of the run, unless a user stopped it (SIGINT)."""
    if received != signal.SIGINT:
        ask_for_restart(run_directory, received.name, state.step)
