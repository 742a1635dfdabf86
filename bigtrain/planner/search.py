"""All legal layouts of a run on a number of devices, each with its costs, best first. Pure.

A layout is legal if a run would accept it: by the rules of `bigtrain.settings.compatibility`, the
batch arithmetic, the model's heads and layers. Offload is only tried where no micro-batch size of
the same degrees fits without it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bigtrain.planner.layout import ADAMW, Layout, OptimizerCosts
from bigtrain.planner.memory import MemoryUse, peak_memory
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.run_layout import usual_chunk
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device
from bigtrain.settings.compatibility.check import check_compatibility
from bigtrain.settings.compatibility.facts import Facts


@dataclass(frozen=True)
class Cluster:
    """The devices to plan for. `host_memory`: bytes of a node's main memory; `margin`: share of a
    device's memory that a plan keeps free."""

    device: Device
    num_devices: int
    host_memory: float
    margin: float = 0.05

    @property
    def usable_memory(self) -> float:
        """Bytes of a device that a layout may take."""
        return self.device.memory_bytes * (1 - self.margin)

    @property
    def host_memory_per_rank(self) -> float:
        """Bytes of main memory for each rank."""
        return self.host_memory / min(self.num_devices, self.device.devices_per_node)


@dataclass(frozen=True)
class Candidate:
    """A layout with its costs. The step time is computed lazily: most of thousands of layouts do
    not fit, and their time is never needed."""

    layout: Layout
    memory: MemoryUse
    fits: bool
    _time: Callable[[], StepTime]

    @functools.cached_property
    def time(self) -> StepTime:
        """Seconds of an optimizer step."""
        return self._time()

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.layout.global_batch_size * self.layout.sequence_length / self.time.total

    @property
    def limit(self) -> str:
        """The name of the step's largest term."""
        terms = self.time.terms()
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class Request:
    """What determines the layouts of a run. `facts`: those of the run itself, for the rules."""

    model: ModelCosts
    facts: Facts
    sequence_length: int
    global_batch_size: int
    parameter_bytes: int
    gradient_bytes: int
    bucket_elements: int
    loss: str
    loss_chunk_tokens: int | None
    optimizer: OptimizerCosts = ADAMW
    zero_stages: Sequence[int] = (0, 1, 2, 3)


def search(
    request: Request, cluster: Cluster, engine: Engine
) -> tuple[list[Candidate], list[Candidate]]:
    """Layouts that fit, fastest first, and those that do not, smallest first."""
    fitting: list[Candidate] = []
    others: list[Candidate] = []
    roomy: set[tuple[int, int, int, int, int]] = set()
    for layout in _layouts(request, cluster.num_devices):
        tried = list(_recomputed(layout, request, cluster, engine))
        for candidate in tried:
            (fitting if candidate.fits else others).append(candidate)
        # Micro-batches of the same degrees ascend. A larger one that needs offload to fit saves
        # less than predictions are wrong by: 4% of a 70B's step on 64 H100, where they miss by 6%.
        degrees = (
            layout.zero_stage,
            layout.tensor_size,
            layout.pipeline_size,
            layout.sequence_size,
            layout.expert_size,
        )
        if any(candidate.fits for candidate in tried):
            roomy.add(degrees)
        if degrees in roomy:
            continue
        for offloaded in _offloaded(layout, request, cluster.num_devices):
            candidate = assess(request.model, offloaded, cluster, engine)
            (fitting if candidate.fits else others).append(candidate)
            if candidate.fits:
                break
    fitting.sort(key=_preference)
    others.sort(key=lambda candidate: candidate.memory.total)
    return fitting, others


def _recomputed(
    layout: Layout, request: Request, cluster: Cluster, engine: Engine
) -> Iterator[Candidate]:
    """`layout` without and with full recomputation; if only the latter fits, also with the fewest
    recomputed layers that fit."""
    full = replace(layout, recompute="full")
    ends = [assess(request.model, each, cluster, engine) for each in (layout, full)]
    yield from ends
    if ends[0].fits or not ends[1].fits:
        return
    for every in _EVERY:
        between = replace(full, recompute_every=every)
        candidate = assess(request.model, between, cluster, engine)
        if candidate.fits:
            yield candidate
            return


_EVERY = (4, 3, 2)  # every n-th layer is recomputed


def _preference(candidate: Candidate) -> tuple[int, float, float]:
    """Faster first; among layouts within one percent, which predictions cannot distinguish, the one
    with less memory."""
    percents = round(math.log(candidate.tokens_per_second) * 100)
    return -percents, candidate.memory.total, -candidate.tokens_per_second


def assess(model: ModelCosts, layout: Layout, cluster: Cluster, engine: Engine) -> Candidate:
    """Memory and time of one layout."""
    memory = peak_memory(model, layout, engine)
    fits = memory.total <= cluster.usable_memory and memory.host <= cluster.host_memory_per_rank
    time = functools.partial(step_time, model, layout, cluster.device, engine)
    return Candidate(layout, memory, fits, time)


def _layouts(request: Request, world_size: int) -> Iterator[Layout]:
    degrees = [
        (t, p, s, e)
        for t in _divisors(world_size)
        for p in _divisors(world_size // t)
        for s in _divisors(world_size // t // p)
        if p <= len(request.model.layers) and request.sequence_length % s == 0
        for e in _divisors(math.gcd(world_size // t // p, request.model.num_experts))
    ]
    for zero in request.zero_stages:
        for t, p, s, e in degrees:
            if not is_legal(request.facts, zero, world_size, t, p, s, e):
                continue
            data = world_size // (t * p * s)
            if request.global_batch_size % data:
                continue
            per_rank = request.global_batch_size // data
            for micro in _divisors(per_rank):
                accumulation = per_rank // micro
                if (p > 1 and accumulation < p) or micro > 64:
                    continue  # more stages than micro-batches: mostly bubble
                yield Layout(
                    data_size=data,
                    tensor_size=t,
                    pipeline_size=p,
                    sequence_size=s,
                    expert_size=e,
                    zero_stage=zero,
                    micro_batch_size=micro,
                    num_accumulation=accumulation,
                    sequence_length=request.sequence_length,
                    loss_chunk_tokens=usual_chunk(
                        request.loss,
                        request.loss_chunk_tokens,
                        request.model.vocabulary_size,
                        micro * request.sequence_length // s,
                    ),
                    parameter_bytes=request.parameter_bytes,
                    gradient_bytes=request.gradient_bytes,
                    reduce_bucket_elements=request.bucket_elements,
                    gather_bucket_elements=request.bucket_elements,
                    overlap_communication=False,
                    optimizer=request.optimizer,
                )


def is_legal(
    facts: Facts,
    zero: int,
    world_size: int,
    tensor: int,
    pipeline: int,
    sequence: int,
    expert: int = 1,
) -> bool:
    """Whether a run of these degrees would be accepted."""
    changed = replace(
        facts,
        zero_stage=zero,
        world_size=world_size,
        tensor_size=tensor,
        pipeline_size=pipeline,
        sequence_size=sequence,
        expert_size=expert,
        pipeline_block=False,
        pipeline_settings=(),
    )
    return not check_compatibility(changed)


def _offloaded(layout: Layout, request: Request, world_size: int) -> Iterator[Layout]:
    """`layout` with more and more offloaded to main memory."""
    full = replace(layout, recompute="full")
    if layout.zero_stage < 1 or layout.pipeline_size > 1:
        return
    offloads: Mapping[str, str | None] = {"offload_optimizer": "cpu"}
    facts = replace(request.facts, **offloads)  # type: ignore[arg-type]
    degrees = (
        layout.tensor_size,
        layout.pipeline_size,
        layout.sequence_size,
        layout.expert_size,
    )
    if is_legal(facts, layout.zero_stage, world_size, *degrees):
        yield replace(layout, offload_optimizer=True)
        yield replace(full, offload_optimizer=True)
    if layout.zero_stage == 3:
        facts = replace(facts, offload_param="cpu")
        if is_legal(facts, 3, world_size, *degrees):
            yield replace(full, offload_optimizer=True, offload_parameters=True)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
