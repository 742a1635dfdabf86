"""The parts of an optimizer step's wall time. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Breakdown:
    """Seconds of an optimizer step on the main rank, means since the last logged step, whose sum
    without `communication_seconds` is `step_seconds`; evaluations and saves are no part of it.

    `data_seconds`: waiting for the batch; on CUDA as far as the device waits too;
    `forward_seconds`, `backward_seconds`: the passes of all micro-batches, without what is the
    engine's; on CUDA the device's time, in which it may have waited for the host; None in a
    pipeline; `compute_seconds`: both passes in a pipeline, where they take turns, exchanges with
    the other stages and waiting for them included; else None; `optimizer_seconds`: the gradient
    norm, clipping, the update and gathering what was updated; `communication_seconds`: in which
    the training thread waits for collectives and messages, a part of the others; on CUDA the time
    for which the compute stream waits for them or computes them itself (exposed communication), of
    the logged step alone; `engine_seconds`: on a CPU DeepSpeed's hooks and reductions
    inside of the passes, without waiting in them, and all of the step outside of the others; on
    CUDA the latter alone, for hooks run while the device computes. Modules that keep DeepSpeed's
    own ZeRO-3 hooks (leaf modules, NVMe) have them counted in the passes.
    """

    data_seconds: float
    forward_seconds: float | None
    backward_seconds: float | None
    compute_seconds: float | None
    optimizer_seconds: float
    communication_seconds: float | None
    engine_seconds: float

    def describe(self) -> str:
        """The parts that are known, in milliseconds, as one line."""
        shown = [
            f"{name.removesuffix('_seconds')} {_milliseconds(seconds)}"
            for name, seconds in asdict(self).items()
            if seconds is not None and name != "communication_seconds"
        ]
        waited = self.communication_seconds
        tail = (
            ""
            if waited is None
            else f", of them {_milliseconds(waited)} ms waiting for other ranks"
        )
        return f"{', '.join(shown)} ms{tail}"


class MeanBreakdown:
    """The mean over the steps of a run; each counts the same."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._num_steps = 0

    def add(self, breakdown: Breakdown, num_steps: int) -> None:
        """Count `num_steps` steps, of which `breakdown` is the mean."""
        self._num_steps += num_steps
        for name, seconds in asdict(breakdown).items():
            if seconds is not None:
                self._sums[name] = self._sums.get(name, 0.0) + seconds * num_steps

    def mean(self) -> Breakdown | None:
        """None of no steps."""
        if self._num_steps <= 0:
            return None
        means: dict[str, Any] = {field.name: None for field in fields(Breakdown)}
        means |= {name: seconds / self._num_steps for name, seconds in self._sums.items()}
        return Breakdown(**means)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1.0 else f"{1e3 * seconds:,.0f}"
