"""Seconds of an optimizer step by term. Pure.

The slowest pipeline stage determines the time of ``m`` micro-batches; the other stages' time for
one micro-batch is the bubble (1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; with
``v`` virtual stages a ``v``-th of it). Layers and the end of a step are computed in
`bigtrain.planner.seconds.layer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigtrain.planner.layout import Layout
from bigtrain.planner.memory_checkpoints import memory_checkpoint_costs
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.seconds.communication import Groups, groups_of
from bigtrain.planner.seconds.layer import (
    Work,
    gradient_seconds,
    head_work,
    layer_work,
    optimizer_seconds,
    orthogonalizing_seconds,
    scale_seconds,
)
from bigtrain.planner.stages import PlannedStage, stage_sizes, stages_of
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by term; they add up to `total`.

    `communication`: exposed communication by kind of parallelism. `memory_checkpoints`: the step's
    share of the copies for checkpoints in memory. `teacher`: forward passes of a teacher in the
    run.
    """

    matmul: float
    memory_bound: float
    communication: Mapping[str, float] = field(default_factory=dict)
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    host: float = 0.0
    memory_checkpoints: float = 0.0
    teacher: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        exposed = sum(self.communication.values())
        parts = (self.matmul, self.memory_bound, self.bubble, self.optimizer, self.offload)
        return sum(parts) + self.host + self.memory_checkpoints + self.teacher + exposed

    def terms(self) -> dict[str, float]:
        """Return seconds by term, communication by kind, without terms that are zero."""
        named = {
            "matmul": self.matmul,
            "memory-bound": self.memory_bound,
            **{f"{kind} communication": value for kind, value in self.communication.items()},
            "bubble": self.bubble,
            "optimizer": self.optimizer,
            "offload": self.offload,
            "host": self.host,
            "memory checkpoints": self.memory_checkpoints,
            "teacher": self.teacher,
        }
        return {name: value for name, value in named.items() if value > 0}


def step_time(
    model: ModelCosts, layout: Layout, device: Device, engine: Engine, *, gain: float = 1.0
) -> StepTime:
    """Return the seconds of an optimizer step of `model`; `gain`: speed-up of products in a faster
    number format."""
    # All other engines have their pipelines outermost: expert- and data-parallel ranks side by
    # side on a node, stages on different ones.
    groups = groups_of(layout, device.devices_per_node, pipeline_outermost=not engine.is_deepspeed)
    kinds = [
        layer_work(layer, model, layout, device, engine, groups, gain) for layer in model.kinds
    ]
    head = head_work(model, layout, device, engine, groups)
    stages = stages_of(model, layout.pipeline_size, engine.balances_stages)
    works: list[Work] = []
    for stage in stages:
        work = Work()
        for kind, count in stage.counts:
            work.add(kinds[kind], count)
        if stage.is_last:
            work.add(head)
        works.append(work)
    return _pipeline(stages, works, model, layout, device, engine, groups)


def _pipeline(
    stages: Sequence[PlannedStage],
    works: Sequence[Work],
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
) -> StepTime:
    at = max(range(len(stages)), key=lambda index: works[index].total)
    slowest, pace, m = stages[at], works[at], layout.num_accumulation
    hidden = layout.tokens_per_micro_batch * model.hidden_size * model.element_bytes
    hidden //= layout.tensor_size  # each rank sends its shard, and the next stage gathers them
    send = groups.pipeline.send(device, hidden)
    virtual = layout.num_virtual_stages
    everyone = sum(s.num_alike * work.total for s, work in zip(stages, works, strict=True))
    others = everyone - pace.total
    bubble = others / virtual + 2 * send * (layout.pipeline_size - 1)
    optimizer, offload = optimizer_seconds(slowest, model, layout, device, engine)
    if engine.measured is None or layout.offload_optimizer:
        data = gradient_seconds(slowest, model, layout, device, engine, groups, pace)
    else:
        optimizer, data = engine.measured.seconds(
            layout.zero_stage,
            layout.num_accumulation,
            layout.partition_size,
            stage_sizes(slowest, model, layout).trained * layout.parameter_bytes,
        )
    optimizer += orthogonalizing_seconds(slowest, model, layout, device, groups)
    optimizer += scale_seconds(slowest, model, layout, device, groups)
    communication = {
        "tensor": m * pace.tensor,
        "sequence": m * pace.sequence,
        "expert": m * pace.expert,
        "pipeline": 2 * send * m * virtual * engine.pipeline_exposed,
        "data": m * pace.zero + data,
    }
    alone = StepTime(
        matmul=m * pace.matmul,
        memory_bound=m * pace.memory_bound,
        communication={kind: value for kind, value in communication.items() if value > 0},
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
        host=m * pace.host,
        memory_checkpoints=_memory_checkpoints(model, layout, device, engine),
    )
    return _on_shared_cores(alone, everyone / (layout.pipeline_size * pace.total), layout, device)


def _memory_checkpoints(model: ModelCosts, layout: Layout, device: Device, engine: Engine) -> float:
    costs = memory_checkpoint_costs(model, layout, device, engine)
    return 0.0 if costs is None else costs.blocked_seconds / costs.every_steps


def _on_shared_cores(alone: StepTime, balance: float, layout: Layout, device: Device) -> StepTime:
    """Return `alone`, the time of ranks with one core each, adjusted for more ranks that share a
    node's cores; `balance`: the mean of the stages' work over the slowest one's.

    Cores then have work if any of their ranks has, so waiting stages cost nothing while others
    compute: a step takes the time of all ranks' work on the cores, but at least the time with a
    core for each.
    """
    num_ranks = min(layout.world_size, device.devices_per_node)
    if not device.num_cores or num_ranks <= device.num_cores:
        return alone
    share = balance * num_ranks / device.num_cores
    work = share * (alone.total - alone.bubble)
    return StepTime(
        matmul=share * alone.matmul,
        memory_bound=share * alone.memory_bound,
        communication={kind: share * value for kind, value in alone.communication.items()},
        bubble=max(0.0, alone.total - work),
        optimizer=share * alone.optimizer,
        offload=share * alone.offload,
        host=share * alone.host,
        memory_checkpoints=share * alone.memory_checkpoints,
    )
