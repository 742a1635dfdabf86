"""Seconds of the end of a step: the reduction of gradients, and the optimizer. Pure."""

from __future__ import annotations

import math

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.seconds.communication import Groups
from bigtrain.planner.seconds.kernels import matmul_seconds, memory_seconds
from bigtrain.planner.seconds.layer import Work
from bigtrain.planner.stages import Stage, matrix_exchange, stage_sizes
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device


def orthogonalizing_seconds(
    stage: Stage, model: ModelCosts, layout: Layout, device: Device, groups: Groups
) -> float:
    """Return the seconds of Muon in addition to a pass over its parameters: matrices are sent to
    the ranks that own them, orthogonalized, and sent back."""
    own = layout.optimizer
    if not own.needs_whole_matrices:
        return 0.0
    work = 0.0
    for kind, alike in stage.counts:
        for product in model.kinds[kind].matmuls:
            short, long = sorted((product.in_size, product.out_size))
            count = alike * product.count * product.num_groups * own.num_iterations
            # X X^T, then A A and A X (engine/optimizers/newton_schulz.py).
            for rows, inner, columns in (
                (short, long, short),
                (short, short, short),
                (short, short, long),
            ):
                work += count * matmul_seconds(device, rows, inner, columns, own.wire_bytes)
    group = groups.tensor if layout.partition_size == 1 else groups.partition
    sent = [num_bytes for num_bytes in matrix_exchange(stage, model, layout) if num_bytes]
    moving = sum(sent) / group.bandwidth(device) + len(sent) * group.latency(device)
    return work / (layout.partition_size * layout.tensor_size) + moving


def gradient_seconds(
    stage: Stage,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
    pace: Work,
) -> float:
    """Return the exposed seconds of reducing gradients and gathering updated parameters, ZeRO 0 to
    2."""
    if layout.partition_size == 1 or layout.zero_stage == 3:
        return 0.0
    sizes = stage_sizes(stage, model, layout)
    expert = sizes.trained_expert
    dense = sizes.trained - expert
    scatter = groups.gather(device, dense, expert, layout.gradient_bytes)
    gather = groups.gather(device, dense, expert, layout.parameter_bytes)
    if engine.is_deepspeed and layout.zero_stage:
        # Each bucket is a collective of its own; those of ZeRO 0 are not configurable.
        latency = groups.partition.latency(device)
        scatter += latency * max(0, math.ceil(sizes.trained / layout.reduce_bucket_elements) - 1)
        gather += latency * max(0, math.ceil(sizes.trained / layout.gather_bucket_elements) - 1)
    # In a pipeline gradients are summed after the last micro-batch, also by FSDP.
    often = engine.reduces_every_micro_batch and layout.pipeline_size == 1
    times = layout.num_accumulation if often else 1
    times = times if layout.zero_stage == 2 else 1
    backward = engine.overlap * pace.device * 2 / 3
    exposed = max(scatter * engine.exposed_gradients, scatter - backward) * times
    return exposed + (scatter if layout.zero_stage == 0 else gather) * engine.exposed_gradients


def optimizer_seconds(
    stage: Stage, model: ModelCosts, layout: Layout, device: Device, engine: Engine
) -> tuple[float, float]:
    """Return the seconds of the update, including its transfers to main memory and back."""
    sizes = stage_sizes(stage, model, layout)
    own, expert = sizes.trained, sizes.trained_expert
    if layout.zero_stage:
        own = (own - expert) / layout.partition_size + expert / layout.expert_replicas
    if not layout.offload_optimizer:
        return memory_seconds(device, engine.optimizer_bytes * own), 0.0
    # Gradients down, parameters up, and AdamW over 28 bytes of a parameter in main memory.
    moved = own * (layout.gradient_bytes + layout.parameter_bytes) / device.host_bandwidth
    bandwidth = device.host_memory_bandwidth / device.devices_per_node
    return 28 * own / bandwidth, moved
