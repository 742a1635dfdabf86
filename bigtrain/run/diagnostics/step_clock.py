"""Wall time of an optimizer step, by part of the step. The parts add up to the step.

On a CPU the training thread's time is split; time in DeepSpeed's hooks during the passes counts as
the engine's (`HostTime`). On CUDA, events on the compute stream are read when a step is logged, so
that no step waits for the device. Time outside of the passes and the update counts as waiting for
the batch, at most as long as the host has waited, and the remaining time as the engine's.

The parts include the time of waiting for other ranks, which is also measured separately: on a CPU
the waits of the thread; on CUDA, in logged steps only, the time between events around every wait of
the compute stream for a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.train_engine import (
    BACKWARD_PASS,
    BOTH_PASSES,
    FORWARD_PASS,
    OPTIMIZER_UPDATE,
)
from bigtrain.metrics.step_metrics import Breakdown
from bigtrain.models.torch_patches import observed_device_waits, observed_waits
from bigtrain.run.reporting.metrics import memory_gib
from bigtrain.system.units import GIB

DATA, ENGINE = "data", "engine"
_PASSES = ("forward", "backward", "compute")
_PART_OF_MARK = {
    FORWARD_PASS: "forward",
    BACKWARD_PASS: "backward",
    BOTH_PASSES: "compute",
    OPTIMIZER_UPDATE: "optimizer",
}
# Steps whose memory is measured even if not logged: the first update allocates optimizer states.
_FIRST_STEPS = 2
# Events between two readings; beyond that, entire steps are not timed.
_MOST_EVENTS = 512
# Waits of one step; a step with more is not reported.
_MOST_WAITS = 1 << 15


_MEASURED_PARTS = ("forward", "backward", "compute", "optimizer", "save", "evaluation")
"""Parts of a step whose memory is measured. compute: forward and backward passes of a pipeline,
which alternate."""


class PartMemory:
    """Peak memory of this rank so far. On CUDA it resets torch's own peak; use `peak_gib` instead.
    Each `begin` takes some 50 microseconds of the host, and does not wait for the device."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._is_measuring = False
        self._part: str | None = None
        self._peak = 0
        self._by_part: dict[str, int] = {}

    def measure(self, is_measured: bool) -> None:
        """Set whether the next parts are measured; unmeasured parts cost nothing."""
        if self._device_type == "cuda" and self._is_measuring and not is_measured:
            self.begin(None)
        self._is_measuring = is_measured

    def begin(self, part: str | None) -> None:
        """Begin a part, or None for time outside of steps."""
        if self._device_type != "cuda" or not self._is_measuring:
            return
        peak = torch.cuda.max_memory_allocated()
        self._peak = max(self._peak, peak)
        if self._part is not None:
            self._by_part[self._part] = max(peak, self._by_part.get(self._part, 0))
        torch.cuda.reset_peak_memory_stats()
        self._part = part if part in _MEASURED_PARTS else None

    def peak_gib(self) -> float:
        """Return `memory_gib`, corrected for the resets."""
        return max(self._peak / GIB, memory_gib(self._device_type))

    def by_part_gib(self) -> dict[str, float] | None:
        """Return the peak of each part so far, in GiB; None on a CPU."""
        if self._device_type != "cuda":
            return None
        return {part: peak / GIB for part, peak in self._by_part.items()}


@dataclass(frozen=True)
class StepTimes:
    """Number of steps since the last reading, and the mean time of a step."""

    num_steps: int
    step_seconds: float
    breakdown: Breakdown


class StepClock:
    """Wall time per optimizer step since the last reading, without pauses. No collective. memory:
    gets the boundaries of the parts. now, make_event: clocks of the host and of the device, for
    tests."""

    def __init__(
        self,
        device_type: str,
        host_time: HostTime,
        memory: PartMemory,
        now: Callable[[], float] = time.perf_counter,
        make_event: Callable[[], Any] | None = None,
    ) -> None:
        self._host_time, self.memory, self._now = host_time, memory, now
        is_cuda = device_type == "cuda"
        self._device = _DeviceParts(make_event) if is_cuda else None
        self.device_waits = DeviceWaits(make_event) if is_cuda else None
        self._seconds: dict[str, float] = {}
        self._part = ENGINE
        self._num_steps = self._num_begun = 0
        # When the current part began, and the totals of `host_time` then; seconds waited before
        # the steps since the last reading, which include pauses.
        self._since, self._hook_seconds = now(), host_time.seconds
        self._waited = host_time.waited

    @contextmanager
    def running(self) -> Iterator[None]:
        """Observe waits for collectives while steps are trained."""
        if self.device_waits is None:
            with observed_waits(self._host_time.add_wait):
                yield
        else:
            with observed_device_waits(self.device_waits.around):
                yield

    def marking(self, on_mark: Callable[[str], object]) -> Callable[[str], None]:
        """Return a callback for `TrainEngine.on_phase`: it begins the part of the mark and calls
        `on_mark`."""

        def begin_marked(mark: str) -> None:
            on_mark(mark)
            self.begin(_PART_OF_MARK.get(mark, ENGINE))

        return begin_marked

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count time inside the block for the part `name`, and time after it as the engine's."""
        self.begin(name)
        yield
        self.begin(ENGINE)

    def begin(self, part: str) -> None:
        """Begin a part of the step: "data", "engine" or the part of a mark."""
        now, hook_total = self._now(), self._host_time.seconds
        part_seconds, hook_seconds = now - self._since, hook_total - self._hook_seconds
        # During a pass, time in DeepSpeed's hooks counts as the engine's.
        if self._part not in _PASSES:
            hook_seconds = 0.0
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + part_seconds - hook_seconds
        self._seconds[ENGINE] = self._seconds.get(ENGINE, 0.0) + hook_seconds
        self._since, self._hook_seconds = now, hook_total
        self._part = part
        self.memory.begin(part)
        if self._device is not None:
            self._device.begin(part)

    def begin_step(self, *, is_logged: bool) -> None:
        """Begin a step; `is_logged`: whether it will be logged."""
        self.memory.measure(is_logged or self._num_begun < _FIRST_STEPS)
        self._num_begun += 1
        if self.device_waits is not None and is_logged:
            self.device_waits.begin()

    def count_step(self) -> None:
        """Count a finished step; time until the next one counts as engine."""
        self.begin(ENGINE)
        self._num_steps += 1
        if self._device is not None:
            self._device.count_step()
        if self.device_waits is not None:
            self.device_waits.end()

    @contextmanager
    def paused(self, pause: str) -> Iterator[None]:
        """Exclude time inside the block from steps; `pause`: its name for `PartMemory`."""
        part, waited_before = self._part, self._host_time.waited
        self.begin(ENGINE)  # ends the time of `part`
        if self._device is not None:
            self._device.begin("pause")
        self.memory.measure(True)
        self.memory.begin(pause)
        try:
            yield
        finally:
            self.memory.begin(None)
            self._waited += self._host_time.waited - waited_before
            self._since, self._hook_seconds = self._now(), self._host_time.seconds
            self._part = part
            if self._device is not None:
                self._device.begin(part)

    def read(self) -> StepTimes:
        """Return the times of the steps since the last reading. The device must have finished
        them."""
        self.begin(self._part)  # adds the time of the current part until now
        num_steps, waited = max(1, self._num_steps), self._host_time.waited - self._waited
        total_seconds = sum(self._seconds.values())
        parts = {part: seconds / num_steps for part, seconds in self._seconds.items()}
        step_seconds = max(total_seconds / num_steps, math.ulp(1.0))  # a divisor: not zero
        communication_seconds: float | None = waited / num_steps
        if self._device is not None:
            # The passes and the update by the device's clock; what remains of the step is split
            # into data, up to the host's wait for the batch, and engine.
            device_parts, data_seconds = self._device.read(), parts.get(DATA, 0.0)
            timed_parts = (*_PASSES, "optimizer")
            parts = {part: device_parts[part] for part in timed_parts if part in device_parts}
            remaining_seconds = max(0.0, step_seconds - sum(parts.values()))
            parts[DATA] = min(data_seconds, remaining_seconds)
            parts[ENGINE] = remaining_seconds - parts[DATA]
        if self.device_waits is not None:
            communication_seconds = self.device_waits.read()
        times = StepTimes(
            self._num_steps,
            step_seconds,
            Breakdown(
                data_seconds=parts.get(DATA, 0.0),
                forward_seconds=None if "compute" in parts else parts.get("forward", 0.0),
                backward_seconds=None if "compute" in parts else parts.get("backward", 0.0),
                compute_seconds=parts.get("compute"),
                optimizer_seconds=parts.get("optimizer", 0.0),
                communication_seconds=communication_seconds,
                engine_seconds=parts.get(ENGINE, 0.0),
            ),
        )
        self._seconds.clear()
        self._num_steps, self._waited = 0, self._host_time.waited
        return times


class _DeviceParts:
    """Events on the compute stream between the parts of steps."""

    def __init__(self, make_event: Callable[[], Any] | None) -> None:
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._events: list[tuple[str, Any]] = []
        self._num_steps = 0
        self._is_full = False

    def begin(self, part: str) -> None:
        if not self._is_full:
            event = self._make_event()
            event.record()
            self._events.append((part, event))

    def count_step(self) -> None:
        if not self._is_full:
            self._num_steps += 1
            self._is_full = len(self._events) >= _MOST_EVENTS

    def read(self) -> dict[str, float]:
        """Return the seconds by part of a step, the mean over timed steps."""
        seconds_by_part: dict[str, float] = {}
        for (part, start), (_, end) in zip(self._events, self._events[1:], strict=False):
            if end.query():
                seconds = start.elapsed_time(end) / 1000
                seconds_by_part[part] = seconds_by_part.get(part, 0.0) + seconds
        num_steps = max(1, self._num_steps)
        current_part, _ = self._events[-1] if self._events else (ENGINE, None)
        self._events.clear()
        self._num_steps, self._is_full = 0, False
        self.begin(current_part)
        return {part: seconds / num_steps for part, seconds in seconds_by_part.items()}


class DeviceWaits:
    """Pairs of events on the compute stream around its waits, in one step."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._pairs: list[tuple[Any, Any]] = []
        self._is_measuring = self._is_complete = False  # complete: every wait of the step is a pair
        self._stream: Any = None

    def begin(self) -> None:
        """Begin a step with measured waits; on the compute stream."""
        self._pairs.clear()
        self._stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self._is_measuring = self._is_complete = True

    def end(self) -> None:
        """End the step."""
        self._is_measuring = False

    @contextmanager
    def around(self) -> Iterator[None]:
        """Measure a block for which the compute stream may wait."""
        if not self._is_measuring:
            yield
            return
        if len(self._pairs) >= _MOST_WAITS:
            self._is_measuring = self._is_complete = False
            yield
            return
        start, end = self._make_event(), self._make_event()
        start.record(self._stream)
        try:
            yield
        finally:
            end.record(self._stream)
            self._pairs.append((start, end))

    def read(self) -> float | None:
        """Return the seconds of waits of the measured step, which must have finished; None if no
        step was measured completely."""
        pairs, is_complete = self._pairs[:], self._is_complete
        self._pairs.clear()
        self._is_complete = False
        if not is_complete or not all(end.query() for _, end in pairs):
            return None
        milliseconds: float = sum(start.elapsed_time(end) for start, end in pairs)
        return milliseconds / 1000
