"""Where to cut a model into pipeline stages. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The slowest stage may be this much slower than in the fastest division, if that saves memory.
_TIME_SLACK = 1.05

StageCost = Callable[[int, int], float]
"""The cost of the stage with layers ``start : stop``."""


@dataclass(frozen=True)
class StageCosts:
    """What the parts of a model cost, in any units.

    layer_time, layer_memory: one of each for each layer. first_*: before the layers (embeddings);
    last_*: after them (head and loss).
    """

    layer_time: tuple[float, ...]
    layer_memory: tuple[float, ...]
    first_time: float = 0.0
    last_time: float = 0.0
    first_memory: float = 0.0
    last_memory: float = 0.0


def balanced_cuts(costs: StageCosts, num_stages: int) -> tuple[int, ...]:
    """Layer indices ``(0, ..., number of layers)`` that cut the model into `num_stages`.

    The slowest stage is as fast as possible, or up to 5% slower if the largest stage then takes
    less memory. Every stage has at least one layer.
    """
    num_layers = len(costs.layer_time)
    assert 1 <= num_stages <= num_layers == len(costs.layer_memory)
    time = _stage_costs(costs.layer_time, costs.first_time, costs.last_time)
    memory = _stage_costs(costs.layer_memory, costs.first_memory, costs.last_memory)
    fastest, _ = _minimax(num_layers, num_stages, time)

    def affordable_memory(start: int, stop: int) -> float:
        slow = time(start, stop) > fastest * _TIME_SLACK
        return float("inf") if slow else memory(start, stop)

    return _minimax(num_layers, num_stages, affordable_memory)[1]


def _stage_costs(layers: Sequence[float], first: float, last: float) -> StageCost:
    sums = [0.0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def cost_of(start: int, stop: int) -> float:
        ends = (first if start == 0 else 0.0) + (last if stop == len(layers) else 0.0)
        return sums[stop] - sums[start] + ends

    return cost_of


def _minimax(num_layers: int, num_stages: int, cost_of: StageCost) -> tuple[float, tuple[int, ...]]:
    """The least possible cost of the largest stage, and cuts that reach it, others alike.

    A stage with more layers never costs less, which is where looking for its start ends.
    """
    Found = tuple[float, float, tuple[int, ...]]  # largest, sum of squares, cuts

    def shortest(best: dict[int, Found], stage: int, stop: int) -> Found:
        found: Found | None = None
        for start in range(stop - 1, stage - 2, -1):
            cost = cost_of(start, stop)
            if found is not None and cost > found[0]:
                break
            largest, squares, cuts = best[start]
            ends = max(largest, cost), squares + cost**2
            if found is None or ends < found[:2] or (ends == found[:2] and cuts < found[2][:-1]):
                found = (*ends, (*cuts, stop))
        assert found is not None
        return found

    best: dict[int, Found] = {
        stop: (cost_of(0, stop), cost_of(0, stop) ** 2, (0, stop))
        for stop in range(1, num_layers + 1)
    }
    for stage in range(2, num_stages + 1):
        best = {stop: shortest(best, stage, stop) for stop in range(stage, num_layers + 1)}
    largest, _, cuts = best[num_layers]
    return largest, cuts
