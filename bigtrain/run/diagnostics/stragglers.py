"""Which rank is slower than its peers.

In synchronous training every rank takes as long for a step as the slowest does, so step times
tell nothing. What is measured is work that no other process can hold up: waiting for the batch, and
the matrix products of one layer (forward, between hooks on its innermost modules, which leaves out
the gathers and reductions of ZeRO-3 and tensor parallelism; a compiled layer, in which there are
none, is timed as a whole, for a hook inside would be compiled with it). The products stand for
those of the whole model: times its share of the parameters, and three for the backward pass. On
GPUs they are timed by events, which are read when a step is logged, so that nothing waits for them.

What shows: a slow or throttled device, a host whose cores are busy, a slow disk. What does not: a
slow link, and anything that is slow outside of both.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.layers.decoder_layers import decoder_layers
from bigtrain.models.parallel.experts import exchange_of
from bigtrain.models.parallel.sharding import local_shape
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState

# Of GPU events between two readings; beyond, products are not timed.
_MOST_EVENTS = 512


class WorkMeter:
    """Seconds of this rank's own work since the last reading."""

    def __init__(self, model: nn.Module, device: torch.device, *, is_compiled: bool) -> None:
        self._on_gpu = device.type == "cuda"
        self._waited = self._multiplied = 0.0
        self._begun: Any = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # A pipeline stage lacks some of the layers.
        each = ((layer, list(_products(layer))) for _, layer in decoder_layers(model))
        layer, products = next((found for found in each if found[1]), (None, []))
        total = sum(_num_elements(module) for module in _products(model))
        sampled = sum(_num_elements(module) for module in products)
        self._per_product = 3.0 * total / sampled if sampled else 0.0
        for module in [layer] if is_compiled and layer is not None else products:
            module.register_forward_pre_hook(self._begin)
            # Before other hooks: the reductions of tensor parallelism are such.
            module.register_forward_hook(self._end, prepend=True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For a batch."""
        begun = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begun

    def read(self) -> float:
        """Seconds of work, as estimated, since this was called last. The device must be done."""
        if self._events:
            pairs = [begun.elapsed_time(ended) for begun, ended in self._events if ended.query()]
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
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if not self._on_gpu:
            self._multiplied += time.perf_counter() - begun
            return
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._events.append((begun, ended))


def _products(module: nn.Module) -> Iterator[nn.Module]:
    """Innermost modules with a matrix; not embeddings, nor experts that ranks divide, within which
    all wait for the rank with the busiest ones."""
    for child in module.modules():
        if isinstance(child, nn.Embedding) or any(True for _ in child.children()):
            continue
        if exchange_of(child) is not None:
            continue
        if any(_dimensions(p) > 1 for p in child.parameters(recurse=False)):
            yield child


def _dimensions(parameter: Any) -> int:
    return len(local_shape(parameter))  # ZeRO-3 leaves an empty tensor


def _num_elements(module: nn.Module) -> int:
    return sum(math.prod(local_shape(parameter)) for parameter in module.parameters(recurse=False))


@dataclass(frozen=True)
class Straggler:
    """A rank whose work takes `work_seconds` a step, of its peers `median_seconds`."""

    rank: int
    work_seconds: float
    median_seconds: float


def find_stragglers(
    work_seconds: Sequence[float], peers: Sequence[int], step_seconds: float, factor: float
) -> list[Straggler]:
    """Processes that are slower than `factor` times the median of the others of their kind, by so
    much that the run feels it: a tenth of a step.

    Parameters: `work_seconds` of a step by rank; `peers`, by rank: equal numbers are compared (the
    stages of a pipeline have different work).
    """
    found = []
    for rank, seconds in enumerate(work_seconds):
        others = [
            other
            for number, other in enumerate(work_seconds)
            if number != rank and peers[number] == peers[rank]
        ]
        usual = max(median(others), 1e-9) if others else seconds
        if seconds > factor * usual and seconds - usual > 0.1 * step_seconds:
            found.append(Straggler(rank, seconds, usual))
    return found


class StragglerWatch:
    """Gathers what all ranks' meters say, and names those that are slow."""

    def __init__(
        self,
        session: Session,
        engine: TrainEngine,
        group: dist.ProcessGroup | None,
        state: TrainState,
    ) -> None:
        """Collective over all ranks. `group`: of all, on the CPU; None for one process."""
        self._session = session
        self.meter = WorkMeter(engine.module, engine.device, is_compiled=engine.is_compiled)
        self._group = group
        self._section = session.run.config.watchdog
        size = session.world.size
        self._hosts: list[Any] = [None] * size
        if group is not None:
            dist.all_gather_object(self._hosts, socket.gethostname(), group=group)
        topology = session.run.topology
        self._peers = [topology.coordinates(rank).pipeline_rank for rank in range(size)]
        self._work = torch.zeros(size, dtype=torch.float64)
        self._seconds, self._num_steps, self._first_sample = 0.0, 0, state.samples

    def gather(self, state: TrainState, num_steps: int, step_seconds: float) -> None:
        """After a step that is logged: what the last `num_steps` took. Collective."""
        own = torch.tensor([self.meter.read()], dtype=torch.float64)
        if self._group is None:
            return
        found = torch.zeros(self._session.world.size, dtype=torch.float64)
        dist.all_gather(list(found.split(1)), own, group=self._group)
        if self._session.metrics is None:
            return
        self._work += found
        self._num_steps += num_steps
        self._seconds += num_steps * step_seconds
        if self._seconds >= self._section.straggler_seconds:
            self._name(state)
            self._work.zero_()
            self._seconds, self._num_steps, self._first_sample = 0.0, 0, state.samples

    def _name(self, state: TrainState) -> None:
        assert self._session.metrics is not None
        step_seconds = self._seconds / self._num_steps
        work = (self._work / self._num_steps).tolist()
        factor = self._section.straggler_factor
        for one in find_stragglers(work, self._peers, step_seconds, factor):
            host = self._hosts[one.rank]
            self._session.metrics.log_event(
                "straggler",
                step=state.step,
                first_sample=self._first_sample,
                num_samples=state.samples - self._first_sample,
                rank=one.rank,
                host=host,
                work_seconds=one.work_seconds,
                median_seconds=one.median_seconds,
            )
            self._session.say(
                f"rank {one.rank} on {host} is slow: {one.work_seconds:.3g} s of its own work a "
                f"step, {one.work_seconds / one.median_seconds:.1f} times the median of its peers"
            )
