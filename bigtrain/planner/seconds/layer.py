"""Seconds of a micro-batch in one decoder layer. Pure.

Collectives of tensor, sequence and expert parallelism are exposed; ZeRO's collectives overlap with
computation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts
from bigtrain.planner.seconds.communication import Group, Groups
from bigtrain.planner.seconds.kernels import (
    PassCosts,
    RankShare,
    attention_seconds,
    cast_bytes,
    memory_seconds,
    weight_seconds,
)
from bigtrain.planner.stages import sequence_bytes
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device


@dataclass(frozen=True)
class TimedMachine:
    """Hardware and software that run a layout: the device of a rank, the training engine, the
    groups of ranks on their nodes, and the speed-up of matrix products in a faster number
    format."""

    device: Device
    engine: Engine
    groups: Groups
    product_gain: float = 1.0


@dataclass
class Work:
    """Seconds of a micro-batch in a layer or stage."""

    matmul: float = 0.0
    memory_bound: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    expert: float = 0.0
    zero: float = 0.0
    host: float = 0.0

    def add(self, other_work: Work, times: float = 1.0) -> None:
        self.matmul += times * other_work.matmul
        self.memory_bound += times * other_work.memory_bound
        self.tensor += times * other_work.tensor
        self.sequence += times * other_work.sequence
        self.expert += times * other_work.expert
        self.zero += times * other_work.zero
        self.host += times * other_work.host

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


def layer_work(layer: LayerCosts, model: ModelCosts, layout: Layout, machine: TimedMachine) -> Work:
    """Return the work of a micro-batch forward and backward through one layer."""
    device, engine = machine.device, machine.engine
    passes = _passes(_pass_key(layer, model, layout, machine))
    forward, backward = passes.forward.copy(), passes.backward.copy()
    for work in (forward, backward):
        work.tensor *= engine.tensor_exposed
        work.expert *= engine.expert_exposed

    # Recomputation repeats parts of the forward pass in the backward pass. `kernel_launches` counts
    # how often the backward pass launches the kernels of a forward pass.
    num_tiles = layout.num_tiles(model.hidden_size) if layer.mlp.products else 0
    tile_work = Work()
    if num_tiles:
        tile_work = _tile_work(layer, model, layout, machine, passes, forward=forward)
    kernel_launches = 2.0
    if layout.recompute == "full":
        backward.add(forward, 1 / layout.recompute_every)
        kernel_launches += 1 / layout.recompute_every
    elif layout.recompute == "operators":
        backward.matmul += forward.matmul / 2
        backward.memory_bound += forward.memory_bound
        kernel_launches = 3.0
    elif layout.recompute == "attention":
        backward.matmul += passes.attention_forward_seconds
    backward.add(tile_work)

    # The host launches kernels and, under ZeRO 3, runs the engine's hooks, a third in the
    # forward pass.
    host_seconds = layer.num_kernels * engine.kernel_host_seconds
    if layer.num_parameters_expert and engine.expert_host_seconds:
        host_seconds += engine.expert_host_seconds * max(1, model.num_experts // layout.expert_size)
    if layout.zero_stage == 3:
        host_seconds += layer.num_tensors * engine.parameter_host_seconds / 3
    # Every tile launches the MLP's kernels, and once more in the backward pass.
    mlp_host_seconds = layer.mlp.num_kernels * engine.kernel_host_seconds
    tiles_host_seconds = max(0, num_tiles - 1) * mlp_host_seconds
    backward_host_seconds = kernel_launches * (host_seconds + tiles_host_seconds)
    backward_host_seconds += num_tiles * mlp_host_seconds
    forward.host = _exposed_host_seconds(forward, host_seconds + tiles_host_seconds, engine)
    backward.host = _exposed_host_seconds(backward, backward_host_seconds, engine)

    if layout.zero_stage == 3 and engine.measured is None:
        _add_zero3_exchange(layer, model, layout, machine, forward=forward, backward=backward)
    if layout.offload_activations:
        # The layer's input is copied during computation (models/layers/activation_offload.py).
        hidden_bytes = model.element_bytes * model.hidden_size * layout.tokens_per_micro_batch
        copy_seconds = hidden_bytes / layout.recompute_every / device.host_bandwidth
        forward.zero += max(0.0, copy_seconds - forward.device)
        backward.zero += max(0.0, copy_seconds - backward.device)

    # Reference rows have a forward pass only.
    forward.add(forward.copy(), layout.num_reference_rows / layout.rows_per_sample)
    if layer.has_backward:
        forward.add(backward)
    return forward


def _exposed_host_seconds(work: Work, host_seconds: float, engine: Engine) -> float:
    """Return the seconds that launching on the host adds to the device's time of `work`:
    ``(host^q + device^q)^(1/q) - device`` with q = `engine.launch_overlap`."""
    device_seconds, exponent = work.device, engine.launch_overlap
    if device_seconds <= 0 or host_seconds <= 0:
        return host_seconds
    larger = max(device_seconds, host_seconds)
    smaller = min(device_seconds, host_seconds)
    return float(larger * (1 + (smaller / larger) ** exponent) ** (1 / exponent) - device_seconds)


def _tile_work(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    machine: TimedMachine,
    passes: _LayerPasses,
    *,
    forward: Work,
) -> Work:
    """Return what tiles of a layer's MLPs add to its backward pass: a second forward pass of the
    MLPs, and for each tile but the first, gradients that are added to sums in float32."""
    work, mlp = Work(), layer.mlp
    work.matmul = mlp.products * (forward.matmul - passes.attention_forward_seconds)
    work.memory_bound = mlp.moved * forward.memory_bound
    work.tensor = forward.tensor / 2  # one of the layer's two all-reduces
    work.expert = forward.expert
    if not model.is_frozen:
        num_gradients = mlp.num_parameters / layout.tensor_size
        num_gradients += mlp.num_parameters_expert / layout.expert_parts
        num_sums = layout.num_tiles(model.hidden_size) - 1
        moved_bytes = num_sums * num_gradients * (8 + model.element_bytes)
        work.memory_bound += memory_seconds(machine.device, moved_bytes)
    return work


class _PassKey(NamedTuple):
    """Everything that the two passes of a layer depend on, without recomputation and ZeRO.

    Layouts that differ in stages, ZeRO and recomputation have the same key. A named tuple, because
    a search builds tens of thousands.
    """

    layer: LayerCosts
    element_bytes: int
    hidden_size: int
    is_frozen: bool
    num_rows: int
    sequence_length: int
    tensor_size: int
    ulysses_size: int
    ring_size: int
    expert_size: int
    tensor_group: Group
    ulysses_group: Group
    ring_group: Group
    expert_group: Group
    splits_norms: bool
    device: Device
    moved_share: float
    attention_speed: float
    product_speed: float
    product_gain: float
    score_passes: tuple[float, float] | None
    is_deepspeed: bool
    casts_fused: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.num_rows * self.sequence_length // (self.ulysses_size * self.ring_size)


@dataclass(frozen=True)
class _LayerPasses:
    """Device time and collectives of a layer's two passes, and the seconds of the forward pass that
    attention takes. Callers copy the work before they change it."""

    forward: Work
    backward: Work
    attention_forward_seconds: float


def _pass_key(
    layer: LayerCosts, model: ModelCosts, layout: Layout, machine: TimedMachine
) -> _PassKey:
    engine, groups = machine.engine, machine.groups
    return _PassKey(
        layer=layer,
        element_bytes=model.element_bytes,
        hidden_size=model.hidden_size,
        is_frozen=model.is_frozen,
        num_rows=layout.num_rows,
        sequence_length=layout.sequence_length,
        tensor_size=layout.tensor_size,
        ulysses_size=layout.ulysses_size,
        ring_size=layout.ring_size,
        expert_size=layout.expert_size,
        tensor_group=groups.tensor,
        ulysses_group=groups.ulysses,
        ring_group=groups.ring,
        expert_group=groups.expert,
        splits_norms=layout.tensor_sequence,
        device=machine.device,
        moved_share=engine.moved,
        attention_speed=engine.attention,
        product_speed=engine.products,
        product_gain=machine.product_gain,
        score_passes=engine.score_passes,
        is_deepspeed=engine.is_deepspeed,
        casts_fused=layout.fused_layers or not engine.is_deepspeed,
    )


@functools.lru_cache(maxsize=1 << 15)
def _passes(key: _PassKey) -> _LayerPasses:
    layer, device, num_tokens = key.layer, key.device, key.num_tokens
    forward, backward = Work(), Work()

    # Matrix products. Frozen weights have only the gradient of their inputs: half the work.
    share = RankShare(num_tokens, key.tensor_size, key.expert_size, key.element_bytes)
    gain = key.product_gain * key.product_speed
    products = [
        (matmul, 0.5 if key.is_frozen or matmul.is_frozen else 1.0) for matmul in layer.matmuls
    ]
    products += [(matmul, 1.0) for matmul in layer.adapters]
    for matmul, backward_share in products:
        seconds = weight_seconds(device, matmul, share, gain)
        forward.matmul += seconds.forward
        backward.matmul += seconds.backward * backward_share
        if key.product_gain > 1:
            num_bytes = cast_bytes(matmul, share, is_fused=key.casts_fused)
            forward.memory_bound += memory_seconds(device, num_bytes.forward)
            backward.memory_bound += memory_seconds(device, num_bytes.backward)

    # Elementwise operations; weights in 4 bits are dequantized before each product.
    undivided_bytes = layer.moved_bytes_whole / (key.tensor_size if key.splits_norms else 1)
    bytes_per_token = key.moved_share * (undivided_bytes + layer.moved_bytes_cut / key.tensor_size)
    elementwise_seconds = memory_seconds(device, bytes_per_token * num_tokens)
    packed = layer.packed
    dequantize_bytes = packed.num_bytes + packed.num_weights * key.element_bytes
    dequantize_seconds = memory_seconds(device, dequantize_bytes)
    forward.memory_bound += elementwise_seconds + dequantize_seconds
    backward.memory_bound += 2 * elementwise_seconds + dequantize_seconds

    # Attention. A ring computes its blocks with fused kernels, whatever attention the architecture
    # has.
    attention = PassCosts(0.0, 0.0)
    if layer.attention is not None:
        score_passes = key.score_passes if layer.score_bytes and key.ring_size == 1 else None
        attention = attention_seconds(
            device,
            layer.attention,
            key.num_rows,
            key.sequence_length,
            num_ranks=key.tensor_size * (key.ulysses_size * key.ring_size),
            score_passes=score_passes,
            speed=key.attention_speed,
        )
        forward.matmul += attention.forward
        backward.matmul += attention.backward

    # Collectives inside the layer.
    _add_hidden_state_exchange(key, forward)
    backward.tensor, backward.expert = forward.tensor, forward.expert
    if key.ulysses_size * key.ring_size > 1 and layer.attention is not None:
        _add_sequence_exchange(key, attention, forward, backward)
    return _LayerPasses(forward, backward, attention.forward)


def _add_hidden_state_exchange(key: _PassKey, forward: Work) -> None:
    """Add the exchanges of a forward pass: two all-reduces of the hidden states under tensor
    parallelism, and the tokens' way to their experts and back."""
    device = key.device
    hidden_bytes = key.num_tokens * key.hidden_size * key.element_bytes
    if key.tensor_size > 1:
        forward.tensor = 2 * key.tensor_group.all_reduce(device, hidden_bytes)
    if key.expert_size > 1:
        expert_bytes = bytes_to_experts(key.layer, hidden_bytes, key.tensor_size)
        if expert_bytes:
            far_bytes = None
            if not key.is_deepspeed:
                # Other engines send a token to another node once, however many of the token's
                # experts are there (DeepEP, HybridEP).
                token_bytes = hidden_bytes / key.tensor_size
                num_experts_per_token = expert_bytes / token_bytes
                far_bytes = token_bytes * key.expert_group.far_nodes(num_experts_per_token)
            # Tokens, their outputs, and before them the counts of tokens.
            forward.expert = 2 * key.expert_group.all_to_all(device, expert_bytes, far_bytes)
            forward.expert += key.expert_group.latency(device)


def bytes_to_experts(layer: LayerCosts, hidden_bytes: float, tensor_size: int) -> float:
    """Return the bytes that a rank sends to the experts of `layer`, for tokens with `hidden_bytes`:
    a row for each expert that a token chooses, of a slice of the tokens from each tensor-parallel
    rank. The same number returns, and the backward pass sends as much in both directions."""
    experts_per_token = max((m.share for m in layer.matmuls if m.num_groups > 1), default=0.0)
    return hidden_bytes * experts_per_token / tensor_size


def _add_sequence_exchange(
    key: _PassKey, attention: PassCosts, forward: Work, backward: Work
) -> None:
    """Add the exposed exchanges of Ulysses and of the ring; `attention`: its seconds, during which
    keys and values travel around the ring."""
    assert key.layer.attention is not None
    device = key.device
    sent_bytes = sequence_bytes(
        key.layer.attention,
        key.num_tokens,
        key.element_bytes,
        tensor_size=key.tensor_size,
        ulysses_size=key.ulysses_size,
    )
    if key.ulysses_size > 1:
        group = key.ulysses_group
        exchange_seconds = group.all_to_all(device, sent_bytes.heads) + 3 * group.latency(device)
        forward.sequence = backward.sequence = exchange_seconds
    if key.ring_size > 1:
        # Keys and values travel while attention to local keys is computed; the first rank needs the
        # keys of all ranks. Other engines return gradients in the dtype of the keys.
        gradient_bytes = sent_bytes.gradients if key.is_deepspeed else sent_bytes.keys
        keys_seconds = key.ring_group.around(device, sent_bytes.keys)
        gradients_seconds = key.ring_group.around(device, gradient_bytes)
        forward.sequence += max(0.0, keys_seconds - attention.forward)
        backward.sequence += max(0.0, keys_seconds + gradients_seconds - attention.backward)


def _add_zero3_exchange(
    layer: LayerCosts,
    model: ModelCosts,
    layout: Layout,
    machine: TimedMachine,
    *,
    forward: Work,
    backward: Work,
) -> None:
    """Add ZeRO 3's exchanges: all-gather of parameters before both passes, reduce-scatter of
    gradients after the backward pass."""
    device, engine, groups = machine.device, machine.engine, machine.groups
    num_dense = layer.num_parameters_whole + layer.num_parameters_cut / layout.tensor_size
    num_expert = layer.num_parameters_expert / layout.expert_parts
    gather_seconds = groups.gather(device, num_dense, num_expert, layout.parameter_bytes)
    num_frozen = layer.num_frozen_whole + layer.num_frozen_cut / layout.tensor_size
    num_frozen_expert = layer.num_frozen_expert / layout.expert_parts
    scatter_seconds = groups.gather(
        device, num_dense - num_frozen, num_expert - num_frozen_expert, layout.gradient_bytes
    )
    if model.is_frozen:
        num_trained = layer.num_adapter_parameters(layout.tensor_size)
        scatter_seconds = groups.gather(device, num_trained, 0.0, layout.gradient_bytes)
    if engine.network and groups.partition.size > groups.partition.per_node:
        slowdown = device.reach.network / engine.network
        gather_seconds, scatter_seconds = gather_seconds * slowdown, scatter_seconds * slowdown
    for work, exchange_seconds in (
        (forward, gather_seconds), (backward, gather_seconds + scatter_seconds),
    ):  # fmt: skip
        # The part that computation hides slows computation down.
        hideable_seconds = engine.overlap * (work.device + work.host)
        work.zero = max(0.0, exchange_seconds - hideable_seconds)
        work.zero += engine.slowdown * min(exchange_seconds, hideable_seconds)
    if layout.offload_parameters:
        # Each rank copies its shard from main memory before it is gathered.
        num_stored = num_dense / groups.partition.size + num_expert / groups.expert_replicas.size
        upload_seconds = num_stored * layout.parameter_bytes / device.host_bandwidth
        forward.zero += upload_seconds
        backward.zero += upload_seconds
