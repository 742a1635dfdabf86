"""How long an optimizer step takes, by term. Pure.

The slowest pipeline stage determines the time of ``m`` micro-batches; the other stages' time for
one micro-batch is the bubble (1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; with
``v`` virtual stages a ``v``-th of it). Within a layer, collectives of tensor, sequence and expert
parallelism are exposed; those of ZeRO overlap with computation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigtrain.planner.communication import Group, Groups, groups_of
from bigtrain.planner.kernels import (
    attention_seconds,
    cast_bytes,
    matmul_seconds,
    memory_seconds,
    weight_seconds,
)
from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts
from bigtrain.planner.stages import Stage, matrix_exchange, stage_sizes, stages_of
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by term; they add up to `total`.

    `communication`: exposed communication by kind of parallelism.
    """

    matmul: float
    memory_bound: float
    communication: Mapping[str, float] = field(default_factory=dict)
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        exposed = sum(self.communication.values())
        parts = (self.matmul, self.memory_bound, self.bubble, self.optimizer, self.offload)
        return sum(parts) + self.host + exposed

    def terms(self) -> dict[str, float]:
        """Seconds by term, communication by kind, without terms that are zero."""
        named = {
            "matmul": self.matmul,
            "memory-bound": self.memory_bound,
            **{f"{kind} communication": value for kind, value in self.communication.items()},
            "bubble": self.bubble,
            "optimizer": self.optimizer,
            "offload": self.offload,
            "host": self.host,
        }
        return {name: value for name, value in named.items() if value > 0}


@dataclass
class _Work:
    """Seconds of one micro-batch in one layer or stage."""

    matmul: float = 0.0
    memory_bound: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    expert: float = 0.0
    zero: float = 0.0
    host: float = 0.0

    def add(self, other: _Work, times: float = 1.0) -> None:
        self.matmul += times * other.matmul
        self.memory_bound += times * other.memory_bound
        self.tensor += times * other.tensor
        self.sequence += times * other.sequence
        self.expert += times * other.expert
        self.zero += times * other.zero
        self.host += times * other.host

    def copy(self) -> _Work:
        copied = _Work()
        copied.add(self)
        return copied

    @property
    def device(self) -> float:
        return self.matmul + self.memory_bound + self.tensor + self.sequence + self.expert

    @property
    def total(self) -> float:
        return self.device + self.zero + self.host


def step_time(
    model: ModelCosts, layout: Layout, device: Device, engine: Engine, *, gain: float = 1.0
) -> StepTime:
    """Seconds of an optimizer step of `model`; `gain`: speed-up of products in a faster number
    format."""
    # All other programs have their pipelines outermost: expert- and data-parallel ranks side by
    # side on a node, stages on different ones.
    groups = groups_of(layout, device.devices_per_node, pipeline_outermost=not engine.is_deepspeed)
    kinds = [_layer(layer, model, layout, device, engine, groups, gain) for layer in model.kinds]
    head = _head(model, layout, device, engine, groups)
    stages = stages_of(model, layout.pipeline_size, engine.balances_stages)
    works: list[_Work] = []
    for stage in stages:
        work = _Work()
        for kind, count in stage.counts:
            work.add(kinds[kind], count)
        if stage.is_last:
            work.add(head)
        works.append(work)
    return _pipeline(stages, works, model, layout, device, engine, groups)


def _pipeline(
    stages: Sequence[Stage],
    works: Sequence[_Work],
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
) -> StepTime:
    at = max(range(len(stages)), key=lambda index: works[index].total)
    slowest, pace, m = stages[at], works[at], layout.num_accumulation
    hidden = layout.tokens_per_micro_batch * model.hidden_size * model.element_bytes
    hidden //= layout.tensor_size  # each rank sends its part, and the next stage gathers them
    send = groups.pipeline.send(device, hidden)
    virtual = layout.num_virtual_stages
    everyone = sum(s.num_alike * work.total for s, work in zip(stages, works, strict=True))
    others = everyone - pace.total
    bubble = others / virtual + 2 * send * (layout.pipeline_size - 1)
    optimizer, offload = _optimizer(slowest, model, layout, device, engine)
    if engine.measured is None or layout.offload_optimizer:
        data = _gradients(slowest, model, layout, device, engine, groups, pace)
    else:
        optimizer, data = engine.measured.seconds(
            layout.zero_stage,
            layout.num_accumulation,
            layout.partition_size,
            stage_sizes(slowest, model, layout).trained * layout.parameter_bytes,
        )
    optimizer += _orthogonalizing(slowest, model, layout, device, groups)
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
    )
    return _on_shared_cores(alone, everyone / (layout.pipeline_size * pace.total), layout, device)


def _on_shared_cores(alone: StepTime, balance: float, layout: Layout, device: Device) -> StepTime:
    """`alone`, of ranks with a core each, where more ranks of a node share its cores; `balance`:
    the mean of the stages' work over the slowest one's.

    Cores then have work whenever any of their ranks has, so that what a stage waits for costs
    nothing as long as others compute: a step takes what all ranks' work takes on the cores, and no
    less than it would with a core for each.
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
    )


def _layer(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
    gain: float,
) -> _Work:
    """A micro-batch forward and backward through one layer."""
    size = (layout.micro_batch_size, layout.sequence_length)
    degrees = (layout.tensor_size, layout.sequence_size, layout.expert_size)
    apart = (groups.tensor, groups.sequence, groups.expert)
    of_model = (model.element_bytes, model.hidden_size, model.is_frozen)
    of_engine = (engine.moved, engine.attention, engine.products, engine.score_passes)
    there, back, again = _passes(
        layer, of_model, size, degrees, apart, layout.tensor_sequence, device, of_engine, gain
    )
    forward, backward = there.copy(), back.copy()
    forward.expert *= engine.expert_exposed
    backward.expert *= engine.expert_exposed
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
    host = layer.num_kernels * engine.kernel_host_seconds
    if layer.num_parameters_expert and engine.expert_host_seconds:
        host += engine.expert_host_seconds * max(1, model.num_experts // layout.expert_size)
    if layout.zero_stage == 3:
        # Hooks of the engine, a third of them in the forward pass.
        host += layer.num_tensors * engine.parameter_host_seconds / 3
    forward.host = _excess(forward.device, host, engine.launch_overlap)
    backward.host = _excess(backward.device, repeated * host, engine.launch_overlap)
    if layout.zero_stage == 3 and engine.measured is None:
        _partitioned(layer, model, layout, device, engine, groups, forward, backward)
    forward.add(backward)
    return forward


@functools.lru_cache(maxsize=1 << 15)
def _passes(
    layer: LayerCosts,
    of_model: tuple[int, int, bool],
    size: tuple[int, int],
    degrees: tuple[int, int, int],
    apart: tuple[Group, Group, Group],
    tensor_sequence: bool,
    device: Device,
    of_engine: tuple[float, float, float, tuple[float, float] | None],
    gain: float,
) -> tuple[_Work, _Work, float]:
    """What a layer's two passes take of device and collectives without recomputation and ZeRO, and
    attention alone forward. Worked out once: layouts of one micro-batch and degrees differ in
    stages, ZeRO and recomputation. The caller copies what it changes."""
    (element_bytes, hidden_size, is_frozen), (samples, length) = of_model, size
    (tensor, sequence, expert), (moved, speed, products, score_passes) = degrees, of_engine
    tokens = samples * length // sequence
    forward, backward = _Work(), _Work()
    again = 0.0
    for matmuls, factor in ((layer.matmuls, 0.5 if is_frozen else 1.0), (layer.adapters, 1.0)):
        for matmul in matmuls:
            there, back = weight_seconds(
                device, matmul, tokens, tensor, expert, element_bytes, gain * products
            )
            forward.matmul += there
            # Of what is frozen there is the gradient of the inputs alone.
            backward.matmul += back * factor
            if gain > 1:
                there, back = cast_bytes(matmul, tokens, tensor, expert, element_bytes)
                forward.memory_bound += memory_seconds(device, there)
                backward.memory_bound += memory_seconds(device, back)
    whole = layer.moved_bytes_whole / (tensor if tensor_sequence else 1)
    elementwise = memory_seconds(device, moved * (whole + layer.moved_bytes_cut / tensor) * tokens)
    # Weights in 4 bits are turned into plain ones before each product.
    own = layer.packed
    unpacking = memory_seconds(device, own.num_bytes + own.num_weights * element_bytes)
    forward.memory_bound += elementwise + unpacking
    backward.memory_bound += 2 * elementwise + unpacking
    if layer.attention is not None:
        passes = score_passes if layer.score_bytes else None
        again, back = attention_seconds(
            device, layer.attention, samples, length, tensor * sequence, passes, speed
        )
        forward.matmul += again
        backward.matmul += back
    hidden = tokens * hidden_size * element_bytes
    _exchange(layer, hidden, degrees, apart, device, forward)
    backward.tensor, backward.sequence = forward.tensor, forward.sequence
    backward.expert = forward.expert
    return forward, backward, again


def _exchange(
    layer: LayerCosts,
    hidden: int,
    degrees: tuple[int, int, int],
    apart: tuple[Group, Group, Group],
    device: Device,
    forward: _Work,
) -> None:
    """What layers send in a forward pass: two sums of the hidden states (of so many bytes) under
    tensor parallelism, queries, keys, values and outputs under sequence parallelism, tokens to
    their experts."""
    (tensor, sequence, expert), (in_tensor, in_sequence, in_expert) = degrees, apart
    if tensor > 1:
        forward.tensor = 2 * in_tensor.all_reduce(device, hidden)
    if sequence > 1 and layer.attention is not None:
        heads = layer.attention
        ratio = heads.num_key_value_heads / heads.num_heads
        forward.sequence = in_sequence.all_to_all(device, hidden * (2 + 2 * ratio) / tensor)
        forward.sequence += 3 * in_sequence.latency(device)
    if expert > 1:
        rows = bytes_to_experts(layer, hidden, tensor)
        if rows:  # tokens, what becomes of them, and before them how many there are
            forward.expert = 2 * in_expert.all_to_all(device, rows)
            forward.expert += in_expert.latency(device)


def bytes_to_experts(layer: LayerCosts, hidden: float, tensor_size: int) -> float:
    """Bytes that a rank has for the experts of `layer`, of tokens with `hidden` bytes: a row for
    each expert that a token chooses, of a slice of the tokens from each tensor-parallel rank. As
    many come back, and as many again in each direction in the backward pass."""
    share = max((m.share for m in layer.matmuls if m.num_groups > 1), default=0.0)
    return hidden * share / tensor_size


def _partitioned(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
    forward: _Work,
    backward: _Work,
) -> None:
    """ZeRO 3: all-gather of parameters before both passes, reduce-scatter of gradients after the
    backward pass."""
    dense = layer.num_parameters_whole + layer.num_parameters_cut / layout.tensor_size
    expert = layer.num_parameters_expert / layout.expert_parts
    gather = _collective(dense, expert, layout.parameter_bytes, device, groups)
    scatter = _collective(dense, expert, layout.gradient_bytes, device, groups)
    if model.is_frozen:
        own = layer.num_adapter_parameters(layout.tensor_size)
        scatter = _collective(own, 0.0, layout.gradient_bytes, device, groups)
    if groups.partition.size > groups.partition.per_node:
        gather, scatter = gather / engine.network, scatter / engine.network
    for work, sent in ((forward, gather), (backward, gather + scatter)):
        beside = engine.overlap * (work.device + work.host)
        work.zero = max(0.0, sent - beside) + engine.slowdown * min(sent, beside)
    if layout.offload_parameters:
        # Each rank copies its part from main memory before it is gathered.
        own = dense / groups.partition.size + expert / groups.expert_replicas.size
        up = own * layout.parameter_bytes / device.host_bandwidth
        forward.zero += up
        backward.zero += up


def _collective(
    dense: float, expert: float, element_bytes: int, device: Device, groups: Groups
) -> float:
    """Seconds to all-gather `dense` elements over all replicas, and `expert` elements over those
    that hold the same experts; a reduce-scatter takes the same."""
    if groups.expert_replicas.size == groups.partition.size:  # one collective for both
        return groups.partition.all_gather(device, (dense + expert) * element_bytes)
    seconds = groups.partition.all_gather(device, dense * element_bytes)
    return seconds + groups.expert_replicas.all_gather(device, expert * element_bytes)


def _head(
    model: ModelCosts, layout: Layout, device: Device, engine: Engine, groups: Groups
) -> _Work:
    """Logits and loss of a micro-batch, forward and backward. Heads stay in 16 bits."""
    tokens, size = layout.tokens_per_micro_batch, model.element_bytes
    columns, hidden = model.vocabulary_size // layout.tensor_size, model.hidden_size
    work = _Work()
    for rows, inner, outer in (
        (tokens, hidden, columns), (tokens, columns, hidden), (hidden, tokens, columns),
    ):  # fmt: skip
        work.matmul += matmul_seconds(device, rows, inner, outer, size, engine.products)
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
    work.memory_bound = memory_seconds(device, moved)
    return work


def _excess(device: float, host: float, exponent: float) -> float:
    """Seconds that launching on the host adds to the device's time."""
    if device <= 0 or host <= 0:
        return host
    larger, smaller = max(device, host), min(device, host)
    return float(larger * (1 + (smaller / larger) ** exponent) ** (1 / exponent) - device)


def _orthogonalizing(
    stage: Stage, model: ModelCosts, layout: Layout, device: Device, groups: Groups
) -> float:
    """Seconds that Muon takes besides a pass over its parameters: matrices are sent to the ranks
    that own them, orthogonalized, and sent back."""
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


def _gradients(
    stage: Stage,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
    pace: _Work,
) -> float:
    """Exposed seconds of reducing gradients and gathering updated parameters, ZeRO 0 to 2."""
    if layout.partition_size == 1 or layout.zero_stage == 3:
        return 0.0
    sizes = stage_sizes(stage, model, layout)
    expert = sizes.trained_expert
    dense = sizes.trained - expert
    scatter = _collective(dense, expert, layout.gradient_bytes, device, groups)
    gather = _collective(dense, expert, layout.parameter_bytes, device, groups)
    if engine.is_deepspeed and layout.zero_stage:
        # Each bucket is a collective of its own; those of ZeRO 0 are not set.
        latency = groups.partition.latency(device)
        scatter += latency * max(0, math.ceil(sizes.trained / layout.reduce_bucket_elements) - 1)
        gather += latency * max(0, math.ceil(sizes.trained / layout.gather_bucket_elements) - 1)
    # In a pipeline gradients are summed after the last micro-batch, by FSDP as well.
    often = engine.reduces_every_micro_batch and layout.pipeline_size == 1
    times = layout.num_accumulation if often else 1
    times = times if layout.zero_stage == 2 else 1
    backward = engine.overlap * pace.device * 2 / 3
    exposed = max(scatter * engine.exposed_gradients, scatter - backward) * times
    return exposed + (scatter if layout.zero_stage == 0 else gather) * engine.exposed_gradients


def _optimizer(
    stage: Stage, model: ModelCosts, layout: Layout, device: Device, engine: Engine
) -> tuple[float, float]:
    """Seconds of the update, and of what it moves to main memory and back."""
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
