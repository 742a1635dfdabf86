"""Stragglers: ranks that are slower than their peers.

In synchronous training the slowest rank determines the step time. So only work that no other rank
can delay is measured: waiting for the batch, and the matrix products of a layer in the forward
pass. Hooks on the innermost modules time the products without gathers and reductions; a compiled
layer is timed as a unit. The time is extrapolated to the model by the number of parameters, and
multiplied by three for the backward pass. On GPUs events measure it, which are read when a step is
logged. This detects a slow device, busy cores or a slow disk; not a slow link, nor slowness outside
of the two measurements.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.startup.cpu_collectives import gather_on_main
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.experts import exchange_of
from bigtrain.models.layers.parameters import decoder_layers, local_shape
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.step_clock import StepTimes
from bigtrain.run.state import TrainState

# GPU events between two readings; beyond that, products are not timed.
_MOST_EVENTS = 512


class WorkMeter:
    """Seconds of this rank's own work since the last reading."""

    def __init__(self, model: nn.Module, device: torch.device, *, is_compiled: bool) -> None:
        self._on_gpu = device.type == "cuda"
        self._wait_seconds = self._product_seconds = 0.0
        self._begun: Any = None  # start of the running product: seconds, or an event on a GPU
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # The first layer on this rank: a pipeline stage lacks some of the layers.
        timed_layer: nn.Module | None = None
        products: list[nn.Module] = []
        for _, layer in decoder_layers(model):
            products = list(_matrix_modules(layer))
            if products:
                timed_layer = layer
                break
        num_elements = sum(_num_elements(module) for module in _matrix_modules(model))
        num_timed = sum(_num_elements(module) for module in products)
        # The backward pass of a product takes twice as long as the forward pass.
        self._model_factor = 3.0 * num_elements / num_timed if num_timed else 0.0
        # Hooks of modules in a compiled layer would break its graph.
        if is_compiled and timed_layer is not None:
            timed_modules = [timed_layer]
        else:
            timed_modules = products
        for module in timed_modules:
            module.register_forward_pre_hook(self._begin)
            # Before other hooks, which include the reductions of tensor parallelism.
            module.register_forward_hook(self._end, prepend=True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count time inside the block as waiting for a batch."""
        start = time.perf_counter()
        yield
        self._wait_seconds += time.perf_counter() - start

    def read(self) -> float:
        """Return estimated seconds of work since the last call; the step must have finished."""
        if self._events:
            milliseconds = [start.elapsed_time(end) for start, end in self._events if end.query()]
            self._product_seconds += sum(milliseconds) / 1000
            self._events.clear()
        seconds = self._wait_seconds + self._model_factor * self._product_seconds
        self._wait_seconds = self._product_seconds = 0.0
        return seconds

    def _begin(self, module: nn.Module, _: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            self._begun = None
        elif not self._on_gpu:
            self._begun = time.perf_counter()
        elif len(self._events) < _MOST_EVENTS:
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()

    def _end(self, module: nn.Module, *_: Any) -> None:
        start, self._begun = self._begun, None
        if start is None:
            return
        if not self._on_gpu:
            self._product_seconds += time.perf_counter() - start
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._events.append((start, end))


def _matrix_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules that have a matrix, except embeddings and divided experts. When
    experts are divided among ranks, every rank waits inside them for the rank with the busiest
    experts, so the time spent there says little about this rank."""
    for child in module.modules():
        has_children = next(child.children(), None) is not None
        if isinstance(child, nn.Embedding) or has_children or exchange_of(child) is not None:
            continue
        # `local_shape` is the shape before ZeRO-3's partition, which leaves empty tensors.
        if any(len(local_shape(p)) > 1 for p in child.parameters(recurse=False)):
            yield child


def _num_elements(module: nn.Module) -> int:
    return sum(math.prod(local_shape(parameter)) for parameter in module.parameters(recurse=False))


@dataclass(frozen=True)
class Straggler:
    """Rank whose work takes `work_seconds` a step; the peers' median is `median_seconds`."""

    rank: int
    work_seconds: float
    median_seconds: float


def find_stragglers(
    work_seconds: Sequence[float], peers: Sequence[int], step_seconds: float, factor: float
) -> list[Straggler]:
    """Return ranks slower than `factor` times the median of the peers and by more than a tenth of a
    step. `work_seconds`: of a step by rank; `peers`: group by rank; the ranks of a group have equal
    work."""
    seconds_by_group: dict[int, list[float]] = {}
    for seconds, group in zip(work_seconds, peers, strict=True):
        seconds_by_group.setdefault(group, []).append(seconds)
    for group_seconds in seconds_by_group.values():
        group_seconds.sort()
    stragglers = []
    for rank, seconds in enumerate(work_seconds):
        group_seconds = seconds_by_group[peers[rank]]
        if len(group_seconds) == 1:
            continue
        # The median of the peers without this rank, by index: a world has thousands of ranks.
        rank_index, num_peers = bisect_right(group_seconds, seconds) - 1, len(group_seconds) - 1
        low, high = (
            group_seconds[index if index < rank_index else index + 1]
            for index in ((num_peers - 1) // 2, num_peers // 2)
        )
        peer_median = max(low if low == high else (low + high) / 2, 1e-9)
        if seconds > factor * peer_median and seconds - peer_median > 0.1 * step_seconds:
            stragglers.append(Straggler(rank, seconds, peer_median))
    return stragglers


class StragglerWatch:
    """Collector of the work times of all ranks, which reports stragglers."""

    def __init__(
        self,
        context: RunContext,
        engine: TrainEngine,
        group: dist.ProcessGroup | None,
        state: TrainState,
    ) -> None:
        """Add hooks to the model. `group`: all ranks, on the CPU; None for one rank."""
        self._context = context
        self.meter = WorkMeter(engine.module, engine.device, is_compiled=engine.is_compiled)
        self._group = group
        self._section = context.config.watchdog
        num_ranks, topology = context.world.size, context.topology
        # The ranks of a pipeline stage have equal work.
        self._peers = [topology.coordinates(rank).pipeline_rank for rank in range(num_ranks)]
        # Since the last report: work seconds by rank, duration, steps, and the first sample.
        self._work = torch.zeros(num_ranks, dtype=torch.float64)
        self._seconds, self._num_steps, self._first_sample = 0.0, 0, state.samples

    def gather(self, state: TrainState, times: StepTimes) -> None:
        """Gather the work since the last logged step; report stragglers every
        ``watchdog.straggler_seconds``. Collective."""
        work_seconds = self.meter.read()
        if self._group is None:
            return
        work_by_rank = gather_on_main(work_seconds, self._group)
        if self._context.log.metrics is None:
            return
        self._work += torch.tensor(work_by_rank, dtype=torch.float64)
        self._num_steps += times.num_steps
        self._seconds += times.num_steps * times.step_seconds
        if self._seconds >= self._section.straggler_seconds:
            step_seconds = self._seconds / self._num_steps
            mean_work = (self._work / self._num_steps).tolist()
            factor = self._section.straggler_factor
            for straggler in find_stragglers(mean_work, self._peers, step_seconds, factor):
                host = self._context.hosts[straggler.rank]
                self._context.log.event(
                    "straggler",
                    state,
                    first_sample=self._first_sample,
                    rank=straggler.rank,
                    host=host,
                    work_seconds=straggler.work_seconds,
                    median_seconds=straggler.median_seconds,
                )
                ratio = straggler.work_seconds / straggler.median_seconds
                self._context.log.info(
                    f"rank {straggler.rank} on {host} is slow: {straggler.work_seconds:.3g} s of "
                    f"its own work a step, {ratio:.1f} times the median of its peers"
                )
            self._work.zero_()
            self._seconds, self._num_steps, self._first_sample = 0.0, 0, state.samples
