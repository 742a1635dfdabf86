"""Stragglers: ranks that are slower than their peers.

In synchronous training the slowest rank determines the step time. So only work that no other rank
can delay is measured: waiting for the batch, and the matrix products of a layer (forward, between
hooks on its innermost modules, which excludes gathers and reductions; a compiled layer is timed as
a unit), extrapolated to the model by its parameters, times three for the backward pass. On GPUs
events time them, read when a step is logged. This detects a slow device, busy cores or a slow disk;
not a slow link, nor slowness outside of the two measurements.
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
        self._waited = self._multiplied = 0.0
        self._begun: Any = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # A pipeline stage lacks some of the layers.
        products_by_layer = ((layer, list(_products(layer))) for _, layer in decoder_layers(model))
        layer, products = next((pair for pair in products_by_layer if pair[1]), (None, []))
        total = sum(_num_elements(module) for module in _products(model))
        sampled = sum(_num_elements(module) for module in products)
        # The backward pass of a product takes twice as long as the forward pass.
        self._per_product = 3.0 * total / sampled if sampled else 0.0
        # Hooks of modules in a compiled layer would break its graph.
        timed_modules = [layer] if is_compiled and layer is not None else products
        for module in timed_modules:
            module.register_forward_pre_hook(self._begin)
            # Before other hooks, which include the reductions of tensor parallelism.
            module.register_forward_hook(self._end, prepend=True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count time inside the block as waiting for a batch."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def read(self) -> float:
        """Return estimated seconds of work since the last call; the step must have finished."""
        if self._events:
            pairs = [start.elapsed_time(end) for start, end in self._events if end.query()]
            self._multiplied += sum(pairs) / 1000
            self._events.clear()
        seconds = self._waited + self._per_product * self._multiplied
        self._waited = self._multiplied = 0.0
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
            self._multiplied += time.perf_counter() - start
            return
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._events.append((start, end))


def _products(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the innermost modules that have a matrix, except embeddings and divided experts. When
    experts are divided among ranks, every rank waits inside them for the rank with the busiest
    experts, so the time spent there says little about this rank."""
    for child in module.modules():
        if isinstance(child, nn.Embedding) or any(True for _ in child.children()):
            continue
        if exchange_of(child) is not None:
            continue
        # ZeRO-3 leaves empty tensors: the shape before its partition says what is a matrix.
        if any(len(local_shape(p)) > 1 for p in child.parameters(recurse=False)):
            yield child


def _num_elements(module: nn.Module) -> int:
    return sum(math.prod(local_shape(parameter)) for parameter in module.parameters(recurse=False))


@dataclass(frozen=True)
class Straggler:
    """Rank whose work takes `work_seconds` a step; the median of the peers: `median_seconds`."""

    rank: int
    work_seconds: float
    median_seconds: float


def find_stragglers(
    work_seconds: Sequence[float], peers: Sequence[int], step_seconds: float, factor: float
) -> list[Straggler]:
    """Return ranks slower than `factor` times the median of the peers and by more than a tenth of a
    step. `work_seconds`: of a step by rank; `peers`: by rank, equal numbers are compared."""
    seconds_by_peers: dict[int, list[float]] = {}
    for seconds, peer_group in zip(work_seconds, peers, strict=True):
        seconds_by_peers.setdefault(peer_group, []).append(seconds)
    for alike in seconds_by_peers.values():
        alike.sort()
    stragglers = []
    for rank, seconds in enumerate(work_seconds):
        alike = seconds_by_peers[peers[rank]]
        usual = seconds
        if len(alike) > 1:
            # The median of the sorted peers without this rank.
            rank_index, num_peers = bisect_right(alike, seconds) - 1, len(alike) - 1
            low, high = (
                alike[index if index < rank_index else index + 1]
                for index in ((num_peers - 1) // 2, num_peers // 2)
            )
            usual = max(low if low == high else (low + high) / 2, 1e-9)
        if seconds > factor * usual and seconds - usual > 0.1 * step_seconds:
            stragglers.append(Straggler(rank, seconds, usual))
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
        """Initialize. `group`: all ranks, on the CPU; None for one rank."""
        self._context = context
        self.meter = WorkMeter(engine.module, engine.device, is_compiled=engine.is_compiled)
        self._group = group
        self._section = context.config.watchdog
        size = context.world.size
        topology = context.topology
        self._peers = [topology.coordinates(rank).pipeline_rank for rank in range(size)]
        self._work = torch.zeros(size, dtype=torch.float64)
        self._seconds, self._num_steps, self._first_sample = 0.0, 0, state.samples

    def gather(self, state: TrainState, times: StepTimes) -> None:
        """Gather the work since the last logged step. Collective."""
        work_seconds = self.meter.read()
        if self._group is None:
            return
        work = gather_on_main(work_seconds, self._group)
        if self._context.log.metrics is None:
            return
        # The report covers all steps since the last one.
        self._work += torch.tensor(work, dtype=torch.float64)
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
