"""The parts of a step, on clocks that a test sets; a device that answers for CUDA."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.train_engine import (
    BACKWARD_PASS,
    BOTH_PASSES,
    COUNTING_TARGETS,
    FORWARD_PASS,
    OPTIMIZER_UPDATE,
)
from bigtrain.metrics.step_metrics import Breakdown, MeanBreakdown
from bigtrain.run.diagnostics import step_clock
from bigtrain.run.diagnostics.step_clock import PartMemory, StepClock

GIB = 2**30


class Clocks:
    """Seconds of the host and of the device."""

    def __init__(self) -> None:
        self.host = self.device = 100.0

    def now(self) -> float:
        return self.host

    def make_event(self) -> Any:
        return Event(self)

    def both(self, seconds: float) -> None:
        self.host += seconds
        self.device += seconds


class Event:
    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks

    def record(self, stream: Any = None) -> None:
        self.at = self._clocks.device

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


class Run:
    """Steps under a clock that the test sets."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.clocks, self.host_time = Clocks(), HostTime()
        self.clock = StepClock(
            device_type,
            self.host_time,
            PartMemory("cpu"),
            self.clocks.now,
            self.clocks.make_event,
        )
        self.announced: list[str] = []
        self.mark = self.clock.marking(self.announced.append)

    def step(self, *passes: tuple[str, float], data: float = 1.0, after: float = 0.5) -> None:
        with self.clock.part("data"):
            self.clocks.both(data)
        for name, seconds in passes:
            self.mark(name)
            self.clocks.both(seconds)
        self.clock.count_step()
        self.clocks.both(after)


PASSES = (
    (COUNTING_TARGETS, 0.25),
    (FORWARD_PASS, 2.0),
    (BACKWARD_PASS, 4.0),
    (FORWARD_PASS, 2.0),
    (BACKWARD_PASS, 6.0),
    (OPTIMIZER_UPDATE, 3.0),
)


def sum_of(breakdown: Breakdown) -> float:
    parts = asdict(breakdown)
    del parts["communication_seconds"]
    return sum(seconds for seconds in parts.values() if seconds is not None)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_parts_are_means_of_the_steps_since_the_last_reading(device_type: str) -> None:
    run = Run(device_type)
    for data in (1.0, 2.0):
        run.step(*PASSES, data=data)
    times = run.clock.read()
    communication = 0.0 if device_type == "cpu" else None
    expected = Breakdown(1.5, 4.0, 10.0, None, 3.0, communication, 0.75)
    assert asdict(times.breakdown) == pytest.approx(asdict(expected))
    assert (times.num_steps, times.step_seconds) == (2, pytest.approx(19.25))
    assert run.announced == 2 * [name for name, _ in PASSES]
    run.step((FORWARD_PASS, 1.0))
    times = run.clock.read()
    assert times.num_steps == 1
    assert times.breakdown.forward_seconds == 1.0
    assert times.breakdown.optimizer_seconds == 0.0
    assert sum_of(times.breakdown) == pytest.approx(times.step_seconds) == 2.5


def test_a_device_s_waits_are_those_of_the_logged_step() -> None:
    """Between the events around them: what the stream computed before is no wait."""
    run = Run("cuda")
    waits = run.clock.device_waits
    assert waits is not None

    def step(seconds: float, *, is_logged: bool) -> None:
        run.clock.begin_step(is_logged=is_logged)
        run.mark(FORWARD_PASS)
        for _ in range(2):
            run.clocks.both(1.0)
            with waits.around():
                run.clocks.both(seconds)
        run.clock.count_step()
        with waits.around():  # agreeing whether to stop
            run.clocks.both(100.0)

    step(5.0, is_logged=False)
    assert run.clock.read().breakdown.communication_seconds is None
    step(5.0, is_logged=False)
    step(0.25, is_logged=True)
    breakdown = run.clock.read().breakdown
    assert breakdown.communication_seconds == pytest.approx(0.5)
    assert breakdown.forward_seconds == pytest.approx((12.0 + 2.5) / 2)
    run.clock.begin_step(is_logged=True)
    run.clock.count_step()
    assert run.clock.read().breakdown.communication_seconds == 0.0


def test_of_a_step_with_too_many_waits_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "_MOST_WAITS", 3)
    run = Run("cuda")
    waits = run.clock.device_waits
    assert waits is not None
    run.clock.begin_step(is_logged=True)
    for _ in range(4):
        with waits.around():
            run.clocks.both(1.0)
    run.clock.count_step()
    assert run.clock.read().breakdown.communication_seconds is None


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_pauses_are_no_part_of_a_step(device_type: str) -> None:
    run = Run(device_type)
    run.step(*PASSES)
    with run.clock.paused("save"):
        run.clocks.both(1000.0)
        run.host_time.seconds += 7.0
        run.host_time.waited += 9.0
    times = run.clock.read()
    assert times.step_seconds == pytest.approx(18.75)
    assert times.breakdown.engine_seconds == pytest.approx(0.75)
    assert times.breakdown.communication_seconds in (0.0, None)


def test_hooks_inside_of_passes_are_the_engine_s_and_waiting_is_a_part_of_all() -> None:
    run = Run()
    run.mark(FORWARD_PASS)
    run.clocks.both(2.0)
    run.host_time.seconds += 0.5
    run.host_time.waited += 0.25
    run.mark(OPTIMIZER_UPDATE)
    run.clocks.both(1.0)
    run.host_time.seconds += 0.125  # of the update, whose own this is
    run.clock.count_step()
    breakdown = run.clock.read().breakdown
    assert (breakdown.forward_seconds, breakdown.optimizer_seconds) == (1.5, 1.0)
    assert (breakdown.engine_seconds, breakdown.communication_seconds) == (0.5, 0.25)


def test_passes_that_take_turns_are_one_part() -> None:
    run = Run()
    run.step((BOTH_PASSES, 6.0), (OPTIMIZER_UPDATE, 3.0))
    breakdown = run.clock.read().breakdown
    assert (breakdown.forward_seconds, breakdown.backward_seconds, breakdown.compute_seconds) == (
        None,
        None,
        6,
    )
    assert sum_of(breakdown) == pytest.approx(10.5)
    assert breakdown.describe().startswith(
        "data 1,000, compute 6,000, optimizer 3,000, engine 500 ms"
    )


def test_a_batch_that_the_device_did_not_wait_for_costs_nothing() -> None:
    """The host runs ahead: it waits for the batch while the device still computes."""
    run = Run("cuda")
    run.mark(FORWARD_PASS)
    run.clocks.device += 10.0
    run.clock.count_step()
    with run.clock.part("data"):
        run.clocks.host += 8.0
    run.clocks.host += 3.0
    reading = run.clock.read()
    assert reading.step_seconds == 11.0
    assert reading.breakdown.forward_seconds == 10.0
    assert (reading.breakdown.data_seconds, reading.breakdown.engine_seconds) == (1.0, 0.0)


def test_only_some_steps_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "_MOST_EVENTS", 20)
    run = Run("cuda")
    made: list[Any] = []
    event = run.clocks.make_event
    monkeypatch.setattr(run.clock._device, "_make_event", lambda: made.append(1) or event())
    for _ in range(50):
        run.step(*PASSES)
    assert len(made) < 40
    breakdown = run.clock.read().breakdown
    assert (breakdown.forward_seconds, breakdown.backward_seconds) == (4.0, 10.0)
    run.step(*PASSES)
    assert run.clock.read().breakdown.forward_seconds == 4.0


def test_the_mean_of_a_run_counts_every_step_once() -> None:
    mean = MeanBreakdown()
    assert mean.mean() is None
    mean.add(Breakdown(1.0, 1.0, 1.0, None, 1.0, None, 1.0), 3)
    mean.add(Breakdown(5.0, 1.0, 1.0, None, 1.0, None, 1.0), 1)
    assert mean.mean() == Breakdown(2.0, 1.0, 1.0, None, 1.0, None, 1.0)


class Allocator:
    """Stands for `torch.cuda`: what is allocated, and the peak since it was reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak = self.num_resets = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self) -> None:
        self.peak = 1 * GIB
        self.num_resets += 1

    def use(self, gib: int) -> None:
        self.peak = max(self.peak, gib * GIB)


def test_peaks_of_phases_leave_the_peak_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Allocator(monkeypatch)
    memory = PartMemory("cuda")
    cuda.use(3)
    memory.measure(True)
    used = {"data": 8, "forward": 5, "backward": 7, "engine": 6, "optimizer": 4}
    for phase, gib in (*used.items(), ("forward", 4), ("optimizer", 3)):
        memory.begin(phase)
        cuda.use(gib)
    memory.measure(False)
    num_resets = cuda.num_resets
    for phase, gib in (("forward", 30), ("backward", 20)):
        memory.begin(phase)
        cuda.use(gib)
    assert cuda.num_resets == num_resets  # steps that are not measured cost nothing
    memory.measure(True)
    memory.begin("save")
    cuda.use(2)
    memory.begin(None)
    assert memory.by_part_gib() == {"forward": 5, "backward": 7, "optimizer": 4, "save": 2}
    assert memory.peak_gib() == 30


def test_a_cpu_has_no_peaks_of_phases() -> None:
    memory = PartMemory("cpu")
    memory.measure(True)
    memory.begin("forward")
    assert memory.by_part_gib() is None
    assert memory.peak_gib() > 0
