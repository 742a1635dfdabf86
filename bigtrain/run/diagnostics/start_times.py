"""Time of a launch on this rank by part, from the start of the process to the first step.

`benchmarks/recovery.py` reads the line of `StartTimes.text` from log.txt.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bigtrain.system.processes import process_start

IMPORTS = "imports and checks"
GROUPS = "process groups"
MODEL = "model"
WEIGHTS = "weights"
FIRST_STEP = "first step"


class StartTimes:
    """Seconds of the parts of a launch. now: the clock; began: returns the time at which this
    process started."""

    def __init__(
        self, now: Callable[[], float] = time.time, began: Callable[[], float] | None = None
    ) -> None:
        self._now = now
        self._began = self._last = (began or process_start)()
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        """Record that `part` has ended; it began when the previous part ended."""
        now = self._now()
        self.seconds[part] = max(0.0, now - self._last)
        self._last = now

    def text(self) -> str:
        """Return the total and all parts for the log, and the end in seconds since the epoch."""
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.seconds.items())
        total = sum(self.seconds.values())
        start = f"{total:.2f} s after the start of the process"
        return f"the first step ended at {self._last:.3f}, {start}: {parts}"
