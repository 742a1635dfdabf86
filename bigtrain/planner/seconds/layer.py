"""Seconds of a micro-batch in one layer and in the head, and of the end of a step. Pure.

Within a layer, collectives of tensor, sequence and expert parallelism are exposed; those of ZeRO
overlap with computation.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts
from bigtrain.planner.seconds.communication import Group, Groups
from bigtrain.planner.seconds.kernels import (
    attention_seconds,
    cast_bytes,
    matmul_seconds,
    memory_seconds,
    weight_seconds,
)
from bigtrain.planner.seconds.sequence_bytes import sequence_bytes
from bigtrain.planner.stages import PlannedStage, block_bytes, matrix_exchange, stage_sizes
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device


@dataclass
class Work:
    """Seconds of one micro-batch in one layer or stage."""

    matmul: float = 0.0
    memory_bound: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    expert: float = 0.0
    zero: float = 0.0
    host: float = 0.0

    def add(self, other: Work, times: float = 1.0) -> None:
        self.matmul += times * other.matmul
        self.memory_bound += times * other.memory_bound
        self.tensor += times * other.tensor
        self.sequence += times * other.sequence
        self.expert += times * other.expert
        self.zero += times * other.zero
        self.host += times * other.host

    def copy(self) -> Work:
        copied = Work()
        copied.add(self)
        return copied

    @property
    def device(self) -> float:
        return self.matmul + self.memory_bound + self.tensor + self.sequence + self.expert

    @property
    def total(self) -> float:
        return self.device + self.zero + self.host


def layer_work(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
    gain: float,
) -> Work:
    """Return the work of a micro-batch forward and backward through one layer."""
    size = (layout.num_rows, layout.sequence_length)
    degrees = (
        layout.tensor_size, layout.ulysses_size, layout.ring_size, layout.expert_size,
    )  # fmt: skip
    apart = (groups.tensor, groups.ulysses, groups.ring, groups.expert)
    of_model = (model.element_bytes, model.hidden_size, model.is_frozen)
    of_engine = (
        engine.moved, engine.attention, engine.products, engine.score_passes, engine.is_deepspeed,
    )  # fmt: skip
    there, back, again = _passes(
        layer, of_model, size, degrees, apart, layout.tensor_sequence, device, of_engine, gain
    )
    forward, backward = there.copy(), back.copy()
    for work in (forward, backward):
        work.tensor *= engine.tensor_exposed
        work.expert *= engine.expert_exposed
    num_tiles = layout.num_tiles(model.hidden_size) if layer.mlp.products else 0
    tiles = _tiles(layer, model, layout, device, forward, again, num_tiles)
    repeated = 2.0
    if layout.recompute == "full":
        backward.add(forward, 1 / layout.recompute_every)
        repeated += 1 / layout.recompute_every
    elif layout.recompute == "operators":
        backward.matmul += forward.matmul / 2
        backward.memory_bound += forward.memory_bound
        repeated = 3.0
    elif layout.recompute == "attention":
        backward.matmul += again
    backward.add(tiles)
    host = layer.num_kernels * engine.kernel_host_seconds
    if layer.num_parameters_expert and engine.expert_host_seconds:
        host += engine.expert_host_seconds * max(1, model.num_experts // layout.expert_size)
    if layout.zero_stage == 3:
        # Hooks of the engine, a third of them in the forward pass.
        host += layer.num_tensors * engine.parameter_host_seconds / 3
    # Every tile has the MLP's kernels, which are launched once more in the backward pass.
    of_tile = layer.mlp.num_kernels * engine.kernel_host_seconds
    more = max(0, num_tiles - 1) * of_tile
    launched = repeated * (host + more) + num_tiles * of_tile
    forward.host = _excess(forward.device, host + more, engine.launch_overlap)
    backward.host = _excess(backward.device, launched, engine.launch_overlap)
    if layout.zero_stage == 3 and engine.measured is None:
        _partitioned(layer, model, layout, device, engine, groups, forward, backward)
    if layout.offload_activations:
        # Copies of its input during computation (models/layers/activation_offload.py).
        hidden = model.element_bytes * model.hidden_size * layout.tokens_per_micro_batch
        copied = hidden / layout.recompute_every / device.host_bandwidth
        forward.zero += max(0.0, copied - forward.device)
        backward.zero += max(0.0, copied - backward.device)
    again = layout.num_reference_rows / layout.rows_per_sample
    forward.add(forward.copy(), again)
    forward.add(backward)
    return forward


def _tiles(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    forward: Work,
    attention: float,
    num_tiles: int,
) -> Work:
    """Return what tiles of a layer's MLPs add to its backward pass: their forward pass once more,
    and for each tile but the first, gradients of parameters that are added to sums in float32.
    `attention`: seconds of the layer's forward pass that are its attention's."""
    work, own = Work(), layer.mlp
    if num_tiles == 0:
        return work
    work.matmul = own.products * (forward.matmul - attention)
    work.memory_bound = own.moved * forward.memory_bound
    work.tensor = forward.tensor / 2  # one of its two all-reduces
    work.expert = forward.expert
    if not model.is_frozen:
        size = own.num_parameters / layout.tensor_size
        size += own.num_parameters_expert / layout.expert_parts
        moved = (num_tiles - 1) * size * (8 + model.element_bytes)
        work.memory_bound += memory_seconds(device, moved)
    return work


@functools.lru_cache(maxsize=1 << 15)
def _passes(
    layer: LayerCosts,
    of_model: tuple[int, int, bool],
    size: tuple[int, int],
    degrees: tuple[int, int, int, int],
    apart: tuple[Group, Group, Group, Group],
    tensor_sequence: bool,
    device: Device,
    of_engine: tuple[float, float, float, tuple[float, float] | None, bool],
    gain: float,
) -> tuple[Work, Work, float]:
    """Return the device time and collectives of a layer's two passes without recomputation and
    ZeRO, and the forward time of attention only. Cached: layouts with one micro-batch and degrees
    differ in stages, ZeRO and recomputation. The caller copies the result before changing it."""
    (element_bytes, hidden_size, is_frozen), (samples, length) = of_model, size
    tensor, ulysses, ring, expert = degrees
    sequence = ulysses * ring
    moved, speed, products, score_passes, is_deepspeed = of_engine
    tokens = samples * length // sequence
    forward, backward = Work(), Work()
    again = 0.0
    for matmuls, factor in ((layer.matmuls, 0.5 if is_frozen else 1.0), (layer.adapters, 1.0)):
        for matmul in matmuls:
            there, back = weight_seconds(
                device, matmul, tokens, tensor, expert, element_bytes, gain * products
            )
            forward.matmul += there
            # Frozen weights have only the gradient of the inputs.
            backward.matmul += back * factor
            if gain > 1:
                there, back = cast_bytes(matmul, tokens, tensor, expert, element_bytes)
                forward.memory_bound += memory_seconds(device, there)
                backward.memory_bound += memory_seconds(device, back)
    whole = layer.moved_bytes_whole / (tensor if tensor_sequence else 1)
    elementwise = memory_seconds(device, moved * (whole + layer.moved_bytes_cut / tensor) * tokens)
    # Weights in 4 bits are dequantized before each product.
    own = layer.packed
    unpacking = memory_seconds(device, own.num_bytes + own.num_weights * element_bytes)
    forward.memory_bound += elementwise + unpacking
    backward.memory_bound += 2 * elementwise + unpacking
    if layer.attention is not None:
        # A ring computes its blocks with fused kernels whatever the architecture's attention is.
        passes = score_passes if layer.score_bytes and ring == 1 else None
        again, back = attention_seconds(
            device, layer.attention, samples, length, tensor * sequence, passes, speed
        )
        forward.matmul += again
        backward.matmul += back
    hidden = tokens * hidden_size * element_bytes
    _exchange(layer, hidden, degrees, apart, device, forward, deduplicates=not is_deepspeed)
    backward.tensor, backward.expert = forward.tensor, forward.expert
    if sequence > 1 and layer.attention is not None:
        sent = sequence_bytes(layer.attention, tokens, element_bytes, degrees[:3])
        if ulysses > 1:
            exchange = apart[1].all_to_all(device, sent.heads) + 3 * apart[1].latency(device)
            forward.sequence = backward.sequence = exchange
        if ring > 1:
            # Keys and values go around in parallel with attention to those that are here; the first
            # rank needs those of all. Other engines return gradients in the dtype of the keys.
            keys = apart[2].around(device, sent.keys)
            back_again = apart[2].around(device, sent.gradients if is_deepspeed else sent.keys)
            forward.sequence += max(0.0, keys - again)
            backward.sequence += max(0.0, keys + back_again - back)
    return forward, backward, again


def _exchange(
    layer: LayerCosts,
    hidden: int,
    degrees: tuple[int, int, int, int],
    apart: tuple[Group, Group, Group, Group],
    device: Device,
    forward: Work,
    *,
    deduplicates: bool,
) -> None:
    """Return the exchanges of a forward pass: two all-reduces of the hidden states (in bytes) under
    tensor parallelism, and tokens to their experts. `deduplicates`: a token is sent to another node
    once regardless of how many of its experts are there (DeepEP, HybridEP)."""
    (tensor, *_, expert), (in_tensor, *_, in_expert) = degrees, apart
    if tensor > 1:
        forward.tensor = 2 * in_tensor.all_reduce(device, hidden)
    if expert > 1:
        rows = bytes_to_experts(layer, hidden, tensor)
        if rows:  # tokens, their outputs, and their counts beforehand
            once = hidden / tensor
            far = once * in_expert.far_nodes(rows / once) if deduplicates else None
            forward.expert = 2 * in_expert.all_to_all(device, rows, far)
            forward.expert += in_expert.latency(device)


def bytes_to_experts(layer: LayerCosts, hidden: float, tensor_size: int) -> float:
    """Return the bytes that a rank sends to the experts of `layer`, for tokens with `hidden` bytes:
    a row for each expert that a token chooses, of a slice of the tokens from each tensor-parallel
    rank. The same number returns, and again in each direction in the backward pass."""
    share = max((m.share for m in layer.matmuls if m.num_groups > 1), default=0.0)
    return hidden * share / tensor_size


def _partitioned(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
    forward: Work,
    backward: Work,
) -> None:
    """Add ZeRO 3's exchanges: all-gather of parameters before both passes, reduce-scatter of
    gradients after the backward pass."""
    dense = layer.num_parameters_whole + layer.num_parameters_cut / layout.tensor_size
    expert = layer.num_parameters_expert / layout.expert_parts
    gather = groups.gather(device, dense, expert, layout.parameter_bytes)
    scatter = groups.gather(device, dense, expert, layout.gradient_bytes)
    if model.is_frozen:
        own = layer.num_adapter_parameters(layout.tensor_size)
        scatter = groups.gather(device, own, 0.0, layout.gradient_bytes)
    if engine.network and groups.partition.size > groups.partition.per_node:
        longer = device.reach.network / engine.network
        gather, scatter = gather * longer, scatter * longer
    for work, sent in ((forward, gather), (backward, gather + scatter)):
        beside = engine.overlap * (work.device + work.host)
        work.zero = max(0.0, sent - beside) + engine.slowdown * min(sent, beside)
    if layout.offload_parameters:
        # Each rank copies its shard from main memory before it is gathered.
        own = dense / groups.partition.size + expert / groups.expert_replicas.size
        up = own * layout.parameter_bytes / device.host_bandwidth
        forward.zero += up
        backward.zero += up


def head_work(
    model: ModelCosts, layout: Layout, device: Device, engine: Engine, groups: Groups
) -> Work:
    """Return the work of logits and losses of a micro-batch, forward and backward. Heads stay in 16
    bits."""
    times = 1 + model.num_further_losses
    tokens, size = layout.tokens_per_micro_batch, model.element_bytes
    columns, hidden = model.vocabulary_size // layout.tensor_size, model.hidden_size
    work = Work()
    for rows, inner, outer in (
        (tokens, hidden, columns), (tokens, columns, hidden), (hidden, tokens, columns),
    ):  # fmt: skip
        seconds = matmul_seconds(device, rows, inner, outer, size, engine.products)
        work.matmul += times * seconds
    work.host = engine.step_seconds
    if layout.tensor_size > 1:
        work.tensor = groups.tensor.all_reduce(device, tokens * hidden * size)
        if engine.is_deepspeed:  # each rank gathers all columns and computes the full loss
            columns = model.vocabulary_size
            work.tensor += groups.tensor.all_gather(device, tokens * columns * size)
        else:
            work.tensor += groups.tensor.all_reduce(device, 12 * tokens)
    moved = engine.loss_bytes * tokens * columns
    trains_outside = not model.is_frozen or model.others_outside.trained(1) > 0
    if layout.loss_chunk_tokens is not None and trains_outside:
        # After each chunk its gradients of the head are read and added to a sum in float32 (writing
        # them is a part of their product).
        chunks = math.ceil(tokens / layout.loss_chunk_tokens)
        weight = model.vocabulary_size // layout.tensor_size * hidden
        moved += (chunks - 1) * weight * (8 + size)
    work.memory_bound = times * memory_seconds(device, moved)
    return work


def _excess(device: float, host: float, exponent: float) -> float:
    """Return the seconds that launching on the host adds to the device's time."""
    if device <= 0 or host <= 0:
        return host
    larger, smaller = max(device, host), min(device, host)
    return float(larger * (1 + (smaller / larger) ** exponent) ** (1 / exponent) - device)


def orthogonalizing_seconds(
    stage: PlannedStage, model: ModelCosts, layout: Layout, device: Device, groups: Groups
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


def scale_seconds(
    stage: PlannedStage, model: ModelCosts, layout: Layout, device: Device, groups: Groups
) -> float:
    """Return the seconds of the all-reduce of the scales of 8-bit moments."""
    group = groups.tensor if layout.partition_size == 1 else groups.partition
    scales = block_bytes(stage_sizes(stage, model, layout), layout)
    return group.all_reduce(device, scales) if scales else 0.0


def gradient_seconds(
    stage: PlannedStage,
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
    stage: PlannedStage, model: ModelCosts, layout: Layout, device: Device, engine: Engine
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
