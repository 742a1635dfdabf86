"""What counts as DeepSpeed's own time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bigtrain.engine.deepspeed_patches import host_time
from bigtrain.engine.deepspeed_patches.host_time import HostTime, time_reductions


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_time, "perf_counter", clock)
    return clock


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_reductions_count_once_and_without_waiting(clock: Clock, zero_stage: int) -> None:
    timer = HostTime()

    def reduce(number: int) -> int:
        clock.now += number
        return number

    def reduce_all(*, bucket_size: int) -> int:
        clock.now += 8.0
        timer.add_wait(3.0)
        if zero_stage:
            engine.optimizer.reduce_ready_partitions_and_remove_grads(16)
        return bucket_size

    optimizer = SimpleNamespace()
    if zero_stage:
        optimizer.reduce_ready_partitions_and_remove_grads = reduce
    engine: Any = SimpleNamespace(optimizer=optimizer, allreduce_gradients=reduce_all)
    time_reductions(engine, timer)
    if zero_stage:
        assert engine.optimizer.reduce_ready_partitions_and_remove_grads(2) == 2
        assert timer.seconds == 2.0
    before = timer.seconds
    assert engine.allreduce_gradients(bucket_size=5) == 5
    assert timer.seconds - before == 5.0 + (16.0 if zero_stage else 0.0)
    assert timer.waited == 3.0


def test_what_fails_is_over(clock: Clock) -> None:
    timer = HostTime()

    def fail() -> None:
        clock.now += 1.0
        raise ArithmeticError

    for number in (1, 2):
        with pytest.raises(ArithmeticError):
            timer.timed(fail)()
        assert timer.seconds == number
