"""How long an optimizer step takes, by term. Pure.

The slowest pipeline stage determines the time of ``m`` micro-batches; the other stages' time for
one micro-batch is the bubble (1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; with
``v`` virtual stages a ``v``-th of it). Within a layer, collectives of tensor, sequence and expert
parallelism are exposed; those of ZeRO overlap with computation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bigtrain.planner.communication import Groups, groups_of
from bigtrain.planner.kernels import (
    attention_seconds,
    matmul_seconds,
    memory_seconds,
    weight_seconds,
)
from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts, trained_parameters
from bigtrain.planner.stage_balance import StageCosts, balanced_cuts
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
        for name in vars(self):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))

    @property
    def device(self) -> float:
        return self.matmul + self.memory_bound + self.tensor + self.sequence + self.expert

    @property
    def total(self) -> float:
        return self.device + self.zero + self.host


def stage_layers(model: ModelCosts, num_stages: int, *, balanced: bool) -> list[range]:
    """Layers of each stage: `balanced` by cost, the head included, as bigtrain divides them, or
    equally many layers each, as Megatron does."""
    if balanced:
        return list(_cut(model, num_stages))
    base, more = divmod(len(model.layers), num_stages)
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + base + (1 if stage < more else 0))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


@functools.lru_cache(maxsize=256)
def _cut(model: ModelCosts, num_stages: int) -> tuple[range, ...]:
    if num_stages == 1:
        return (range(len(model.layers)),)
    sizes = tuple(float(model.kinds[kind].num_parameters) for kind in model.layers)
    times = tuple(model.kinds[kind].num_active_parameters for kind in model.layers)
    head = float(model.head_parameters or model.embedding_parameters)
    costs = StageCosts(
        layer_time=times,
        layer_memory=sizes,
        first_memory=float(model.embedding_parameters),
        last_time=head,
        last_memory=head,
    )
    bounds = balanced_cuts(costs, num_stages)
    return tuple(range(begin, end) for begin, end in itertools.pairwise(bounds))


def step_time(
    model: ModelCosts, layout: Layout, device: Device, engine: Engine, *, gain: float = 1.0
) -> StepTime:
    """Seconds of an optimizer step of `model`; `gain`: speed-up of products in a faster number
    format."""
    groups = groups_of(layout, device.devices_per_node)
    kinds = [_layer(layer, model, layout, device, engine, groups, gain) for layer in model.kinds]
    head = _head(model, layout, device, engine, groups, gain)
    stages: list[_Work] = []
    ranges = stage_layers(model, layout.pipeline_size, balanced=engine.balances_stages)
    for index, layers in enumerate(ranges):
        work = _Work()
        for kind, costs in enumerate(kinds):
            work.add(costs, sum(1 for layer in layers if model.layers[layer] == kind))
        if index == len(ranges) - 1:
            work.add(head)
        stages.append(work)
    return _pipeline(stages, ranges, model, layout, device, engine, groups)


def _pipeline(
    stages: Sequence[_Work],
    ranges: Sequence[range],
    model: ModelCosts,
    layout: Layout,
    device: Device,
    engine: Engine,
    groups: Groups,
) -> StepTime:
    slowest = max(range(len(stages)), key=lambda stage: stages[stage].total)
    pace, m = stages[slowest], layout.num_accumulation
    hidden = layout.tokens_per_micro_batch * model.hidden_size * model.element_bytes
    hidden //= layout.tensor_size  # each rank sends its part, and the next stage gathers them
    send = groups.pipeline.send(device, hidden)
    virtual = layout.num_virtual_stages
    others = sum(stage.total for stage in stages) - pace.total
    bubble = others / virtual + 2 * send * (layout.pipeline_size - 1)
    optimizer, offload = _optimizer(ranges[slowest], model, layout, device, engine)
    if engine.measured is None or layout.offload_optimizer:
        data = _gradients(ranges[slowest], model, layout, device, engine, groups, pace)
    else:
        trained, _ = trained_of_stage(ranges[slowest], model, layout)
        optimizer, data = engine.measured.seconds(
            layout.zero_stage,
            layout.num_accumulation,
            layout.partition_size,
            trained * layout.parameter_bytes,
        )
    optimizer += _orthogonalizing(ranges[slowest], model, layout, device, groups)
    communication = {
        "tensor": m * pace.tensor,
        "sequence": m * pace.sequence,
        "expert": m * pace.expert,
        "pipeline": 2 * send * m * virtual,
        "data": m * pace.zero + data,
    }
    return StepTime(
        matmul=m * pace.matmul,
        memory_bound=m * pace.memory_bound,
        communication={kind: value for kind, value in communication.items() if value > 0},
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
        host=m * pace.host,
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
    """Forward and backward pass of a micro-batch through one layer."""
    tokens, size = layout.tokens_per_micro_batch, model.element_bytes
    forward, backward = _Work(), _Work()
    again = 0.0
    for matmul in layer.matmuls:
        there, back = weight_seconds(
            device, matmul, tokens, layout.tensor_size, layout.expert_size, size, gain
        )
        forward.matmul += there
        # Frozen weights need the gradient of the inputs only.
        backward.matmul += back / 2 if model.is_frozen else back
    for matmul in layer.adapters:
        there, back = weight_seconds(
            device, matmul, tokens, layout.tensor_size, layout.expert_size, size, gain
        )
        forward.matmul += there
        backward.matmul += back
    elementwise = _elementwise(layer, layout, device, engine)
    forward.memory_bound, backward.memory_bound = elementwise, 2 * elementwise
    if layer.attention is not None:
        passes = engine.score_passes if layer.score_bytes else None
        there, back = attention_seconds(
            device,
            layer.attention,
            layout.micro_batch_size,
            layout.sequence_length,
            layout.tensor_size * layout.sequence_size,
            passes,
            engine.attention,
        )
        again = there
        forward.matmul += there
        backward.matmul += back
    _exchange(layer, model, layout, device, groups, forward)
    for kind in ("tensor", "sequence", "expert"):
        setattr(backward, kind, getattr(forward, kind))
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
    if layout.zero_stage == 3:
        # Hooks of the engine, a third of them in the forward pass.
        host += layer.num_tensors * engine.parameter_host_seconds / 3
    forward.host = _excess(forward.device, host, engine.launch_overlap)
    backward.host = _excess(backward.device, repeated * host, engine.launch_overlap)
    if layout.zero_stage == 3 and engine.measured is None:
        _partitioned(layer, model, layout, device, engine, groups, forward, backward)
    forward.add(backward)
    return forward


def _elementwise(layer: LayerCosts, layout: Layout, device: Device, engine: Engine) -> float:
    whole = layer.moved_bytes_whole / (layout.tensor_size if layout.tensor_sequence else 1)
    moved = whole + layer.moved_bytes_cut / layout.tensor_size
    return memory_seconds(device, engine.moved * moved * layout.tokens_per_micro_batch)


def _exchange(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    device: Device,
    groups: Groups,
    forward: _Work,
) -> None:
    """Communication of a layer's forward pass: two all-reduces of the hidden states under tensor
    parallelism; all-to-alls of queries, keys, values and outputs under sequence parallelism, and of
    tokens under expert parallelism."""
    hidden = layout.tokens_per_micro_batch * model.hidden_size * model.element_bytes
    if layout.tensor_size > 1:
        forward.tensor = 2 * groups.tensor.all_reduce(device, hidden)
    if layout.sequence_size > 1 and layer.attention is not None:
        heads = layer.attention
        ratio = heads.num_key_value_heads / heads.num_heads
        exchanged = hidden * (2 + 2 * ratio) / layout.tensor_size
        forward.sequence = groups.sequence.all_to_all(device, exchanged)
        forward.sequence += 3 * groups.sequence.latency(device)
    if layout.expert_size > 1:
        share = max((m.share for m in layer.matmuls if m.num_groups > 1), default=0.0)
        if share:  # dispatch and combine, and before them the counts
            sent = hidden * share / layout.tensor_size  # a slice of the tokens from each
            forward.expert = 2 * groups.expert.all_to_all(device, sent)
            forward.expert += groups.expert.latency(device)


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
    model: ModelCosts, layout: Layout, device: Device, engine: Engine, groups: Groups, gain: float
) -> _Work:
    """Logits and loss of a micro-batch, forward and backward."""
    del gain  # heads stay in 16 bits
    tokens, size = layout.tokens_per_micro_batch, model.element_bytes
    columns, hidden = model.vocabulary_size // layout.tensor_size, model.hidden_size
    work = _Work()
    for rows, inner, outer in (
        (tokens, hidden, columns), (tokens, columns, hidden), (hidden, tokens, columns),
    ):  # fmt: skip
        work.matmul += matmul_seconds(device, rows, inner, outer, size)
    work.host = engine.step_seconds
    if layout.tensor_size > 1:
        work.tensor = groups.tensor.all_reduce(device, tokens * hidden * size)
        if engine.is_deepspeed:  # each rank gathers all columns and computes the full loss
            columns = model.vocabulary_size
            work.tensor += groups.tensor.all_gather(device, tokens * columns * size)
        else:
            work.tensor += groups.tensor.all_reduce(device, 12 * tokens)
    work.memory_bound = memory_seconds(device, engine.loss_bytes * tokens * columns)
    return work


def _excess(device: float, host: float, exponent: float) -> float:
    """Seconds that launching on the host adds to the device's time."""
    if device <= 0 or host <= 0:
        return host
    larger, smaller = max(device, host), min(device, host)
    return float(larger * (1 + (smaller / larger) ** exponent) ** (1 / exponent) - device)


def stage_parameters(layers: range, model: ModelCosts, layout: Layout) -> tuple[float, float]:
    """Parameters of a rank that holds `layers`, and how many of them are experts'."""
    dense = expert = 0.0
    for index in layers:
        kind = model.kinds[model.layers[index]]
        dense += kind.num_parameters_whole + kind.num_parameters_cut / layout.tensor_size
        expert += kind.num_parameters_expert / layout.expert_parts
    first, last = layers.start == 0, layers.stop == len(model.layers)
    if first:
        dense += model.embedding_parameters / layout.tensor_size
    if last:
        dense += model.num_other_parameters
        head = model.head_parameters or (0 if first else model.embedding_parameters)
        dense += head / layout.tensor_size
    return dense + expert, expert


def trained_of_stage(layers: range, model: ModelCosts, layout: Layout) -> tuple[float, float]:
    """As `stage_parameters`, of the trained parameters; adapters do not count as experts'."""
    held, expert = stage_parameters(layers, model, layout)
    trained = trained_parameters(layers, model, held, layout.tensor_size)
    return trained, 0.0 if model.is_frozen else expert


def matrix_share(layers: range, model: ModelCosts) -> float:
    """Share of a stage's parameters in matrices of hidden layers (routers, which are small,
    included)."""
    whole, _ = stage_parameters(layers, model, Layout(data_size=1))
    matrices = sum(
        product.in_size * product.out_size * product.num_groups * product.count
        for index in layers
        for product in model.kinds[model.layers[index]].matmuls
    )
    return min(1.0, matrices / max(1.0, whole))


def _orthogonalizing(
    layers: range, model: ModelCosts, layout: Layout, device: Device, groups: Groups
) -> float:
    """Seconds that Muon takes besides a pass over its parameters: matrices are sent to the ranks
    that own them, orthogonalized, and sent back."""
    own = layout.optimizer
    if own.type != "muon":
        return 0.0
    work = 0.0
    for index in layers:
        for product in model.kinds[model.layers[index]].matmuls:
            short, long = sorted((product.in_size, product.out_size))
            count = product.count * product.num_groups * own.num_iterations
            # X X^T, then A A and A X (engine/optimizers/newton_schulz.py).
            for rows, inner, columns in (
                (short, long, short),
                (short, short, short),
                (short, short, long),
            ):
                work += count * matmul_seconds(device, rows, inner, columns, own.wire_bytes)
    held, _ = stage_parameters(layers, model, layout)
    parts = layout.partition_size if layout.zero_stage else 1
    sent = own.wire_bytes * matrix_share(layers, model) * held
    there = groups.partition.all_to_all(device, sent / parts)
    back = groups.partition.all_to_all(device, sent / (1 if layout.zero_stage == 0 else parts))
    return work / (layout.partition_size * layout.tensor_size) + there + back


def _gradients(
    layers: range,
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
    dense, expert = trained_of_stage(layers, model, layout)
    dense -= expert
    scatter = _collective(dense, expert, layout.gradient_bytes, device, groups)
    gather = _collective(dense, expert, layout.parameter_bytes, device, groups)
    times = layout.num_accumulation if engine.reduces_every_micro_batch else 1
    times = times if layout.zero_stage == 2 else 1
    backward = engine.overlap * pace.device * 2 / 3
    exposed = max(scatter * engine.exposed_gradients, scatter - backward) * times
    return exposed + (scatter if layout.zero_stage == 0 else gather) * engine.exposed_gradients


def _optimizer(
    layers: range, model: ModelCosts, layout: Layout, device: Device, engine: Engine
) -> tuple[float, float]:
    """Seconds of the update, and of its transfers to main memory and back."""
    held, expert = trained_of_stage(layers, model, layout)
    own = held
    if layout.zero_stage:
        own = (held - expert) / layout.partition_size + expert / layout.expert_replicas
    if not layout.offload_optimizer:
        return memory_seconds(device, engine.optimizer_bytes * own), 0.0
    # Gradients down, parameters up, and AdamW over 28 bytes of a parameter in main memory.
    moved = own * (layout.gradient_bytes + layout.parameter_bytes) / device.host_bandwidth
    bandwidth = device.host_memory_bandwidth / device.devices_per_node
    return 28 * own / bandwidth, moved
