"""Time that the training thread spends in DeepSpeed's hooks in the middle of the passes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


class HostTime:
    """Seconds of the training thread since the process began; they only grow. seconds: in
    DeepSpeed's hooks, without waiting for collectives. waited: for collectives, while
    `bigtrain.models.torch_patches.observed_waits` measures it."""

    __slots__ = ("_is_inside", "seconds", "waited")

    def __init__(self) -> None:
        self.seconds = self.waited = 0.0
        self._is_inside = False

    def add_wait(self, seconds: float) -> None:
        """Add the time in which the thread waited for a collective."""
        self.waited += seconds

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its time counted as DeepSpeed's; nested calls count once."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start, waited_before = perf_counter(), self.waited
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += perf_counter() - start - (self.waited - waited_before)
                self._is_inside = False

        return call


def time_reductions(engine: Any, host_time: HostTime) -> None:
    """Measure ZeRO's reduction of gradients as they are computed, and at the end of a pass.

    DeepSpeed 0.19.8 calls both through the object: `reduce_ready_partitions_and_remove_grads`
    (runtime/zero/stage3.py:1508, stage_1_and_2.py:2291) and `allreduce_gradients`
    (runtime/engine.py:3165, pipe/engine.py:294). `zero12_reduction` measures the reductions that it
    makes.
    """
    optimizer, name = engine.optimizer, "reduce_ready_partitions_and_remove_grads"
    if hasattr(optimizer, name):
        setattr(optimizer, name, host_time.timed(getattr(optimizer, name)))
    engine.allreduce_gradients = host_time.timed(engine.allreduce_gradients)
