"""Seconds of an optimizer step by term. Pure.

The slowest pipeline stage determines the time of ``m`` micro-batches; the time of all further
stages for one micro-batch is the bubble (1F1B: Narayanan et al. 2021, arXiv 2104.04473, section
2.2; with
``v`` virtual stages a ``v``-th of it). Seconds of layers are computed in
`bigtrain.planner.seconds.layer`, of the head and the end of a step in
`bigtrain.planner.seconds.step_end`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bigtrain.planner.layout import Layout
from bigtrain.planner.memory_checkpoints import memory_checkpoint_costs
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.seconds.communication import groups_of
from bigtrain.planner.seconds.layer import TimedMachine, Work, layer_work
from bigtrain.planner.seconds.step_end import (
    gradient_seconds,
    head_work,
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
        communication = sum(self.communication.values())
        terms = (self.matmul, self.memory_bound, self.bubble, self.optimizer, self.offload)
        return sum(terms) + self.host + self.memory_checkpoints + self.teacher + communication

    def terms(self) -> dict[str, float]:
        """Return seconds by term, communication by kind, without terms that are zero."""
        seconds_by_term = {
            "matmul": self.matmul,
            "memory-bound": self.memory_bound,
            **{
                f"{parallelism} communication": seconds
                for parallelism, seconds in self.communication.items()
            },
            "bubble": self.bubble,
            "optimizer": self.optimizer,
            "offload": self.offload,
            "host": self.host,
            "memory checkpoints": self.memory_checkpoints,
            "teacher": self.teacher,
        }
        return {name: seconds for name, seconds in seconds_by_term.items() if seconds > 0}


def step_time(
    model: ModelCosts, layout: Layout, device: Device, engine: Engine, *, gain: float = 1.0
) -> StepTime:
    """Return the seconds of an optimizer step of `model`; `gain`: speed-up of products in a faster
    number format, in addition to `Layout.float8`."""
    if engine.is_deepspeed and device.measured_reach is not None:
        device = replace(device, reach=device.measured_reach)
    if layout.float8:
        gain *= device.float8_gain * engine.float8
    if layout.fused_layers:
        model = model.with_fused_operations
    # All other engines have their pipelines outermost: expert- and data-parallel ranks side by
    # side on a node, stages on different ones.
    groups = groups_of(layout, device.devices_per_node, pipeline_outermost=not engine.is_deepspeed)
    machine = TimedMachine(device, engine, groups, gain)
    layer_works = [layer_work(layer, model, layout, machine) for layer in model.kinds]
    last_work = head_work(model, layout, machine)
    stages = stages_of(model, layout.pipeline_size, engine.balances_stages)
    stage_works: list[Work] = []
    for stage in stages:
        work = Work()
        for kind, num_layers in stage.counts:
            work.add(layer_works[kind], num_layers)
        if stage.is_last:
            work.add(last_work)
        stage_works.append(work)
    return _pipeline_time(stages, stage_works, model, layout, machine)


def _pipeline_time(
    stages: Sequence[PlannedStage],
    stage_works: Sequence[Work],
    model: ModelCosts,
    layout: Layout,
    machine: TimedMachine,
) -> StepTime:
    """Return the seconds of a step whose stages have `stage_works` per micro-batch."""
    device, engine, num_micro_batches = machine.device, machine.engine, layout.num_accumulation

    # The slowest stage sets the pace, and waits once for the work of all further stages (the
    # bubble).
    slowest_index = max(range(len(stages)), key=lambda index: stage_works[index].total)
    slowest_stage, pace = stages[slowest_index], stage_works[slowest_index]
    all_stages_seconds = sum(
        stage.num_alike * work.total for stage, work in zip(stages, stage_works, strict=True)
    )
    other_stages_seconds = all_stages_seconds - pace.total
    hidden_bytes = layout.tokens_per_micro_batch * model.hidden_size * model.element_bytes
    # Each rank sends its shard, and the next stage gathers the shards.
    hidden_bytes //= layout.tensor_size
    send_seconds = machine.groups.pipeline.send(device, hidden_bytes)
    num_virtual = layout.num_virtual_stages
    bubble = other_stages_seconds / num_virtual + 2 * send_seconds * (layout.pipeline_size - 1)

    # The end of the step: gradients, update, memory checkpoints.
    update = optimizer_seconds(slowest_stage, model, layout, machine)
    if engine.measured is None or layout.offload_optimizer:
        update_seconds = update.update
        data_seconds = gradient_seconds(slowest_stage, model, layout, machine, pace)
    else:
        update_seconds, data_seconds = engine.measured.seconds(
            layout.zero_stage,
            num_micro_batches,
            layout.partition_size,
            stage_sizes(slowest_stage, model, layout).trained * layout.parameter_bytes,
        )
    update_seconds += orthogonalizing_seconds(slowest_stage, model, layout, machine)
    update_seconds += scale_seconds(slowest_stage, model, layout, machine)
    checkpoints = memory_checkpoint_costs(model, layout, device, engine)

    sends_seconds = 2 * send_seconds * num_micro_batches * num_virtual
    communication = {
        "tensor": num_micro_batches * pace.tensor,
        "sequence": num_micro_batches * pace.sequence,
        "expert": num_micro_batches * pace.expert,
        "pipeline": sends_seconds * engine.pipeline_exposed,
        "data": num_micro_batches * pace.zero + data_seconds,
    }
    time = StepTime(
        matmul=num_micro_batches * pace.matmul,
        memory_bound=num_micro_batches * pace.memory_bound,
        communication={name: seconds for name, seconds in communication.items() if seconds > 0},
        bubble=bubble,
        optimizer=update_seconds,
        offload=update.transfer,
        host=num_micro_batches * pace.host,
        memory_checkpoints=checkpoints.blocked_seconds / checkpoints.every_steps
        if checkpoints
        else 0.0,
    )
    stage_balance = all_stages_seconds / (layout.pipeline_size * pace.total)
    return _on_shared_cores(time, stage_balance, layout, device)


def _on_shared_cores(
    time: StepTime, stage_balance: float, layout: Layout, device: Device
) -> StepTime:
    """Return `time`, which assumes a core for each rank, adjusted for more ranks that share a
    node's cores; `stage_balance`: the mean of the stages' work over the slowest stage's.

    Cores then have work if any of their ranks has, so waiting stages cost nothing while further
    stages compute: a step takes the time of the ranks' work on the cores, but at least the time
    with a core for each."""
    num_ranks = min(layout.world_size, device.devices_per_node)
    if not device.num_cores or num_ranks <= device.num_cores:
        return time
    share = stage_balance * num_ranks / device.num_cores
    work_seconds = share * (time.total - time.bubble)
    return StepTime(
        matmul=share * time.matmul,
        memory_bound=share * time.memory_bound,
        communication={name: share * seconds for name, seconds in time.communication.items()},
        bubble=max(0.0, time.total - work_seconds),
        optimizer=share * time.optimizer,
        offload=share * time.offload,
        host=share * time.host,
        memory_checkpoints=share * time.memory_checkpoints,
    )
