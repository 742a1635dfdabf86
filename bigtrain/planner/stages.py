"""Division of a model into pipeline stages, and the contents of a rank of each. Pure.

A search needs the same few stages tens of thousands of times: values that depend only on the model,
its division and the degrees are cached.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import Attention, ModelCosts

# The slowest stage may be this much slower than in the fastest division, if that saves memory.
_TIME_SLACK = 1.05

StageCost = Callable[[int, int], float]
"""Cost of the stage with layers ``start : stop``."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of the parts of a model, in any units.

    layer_time, layer_memory: one entry per layer. first_*: before the layers (embeddings);
    last_*: after them (head and loss).
    """

    layer_time: tuple[float, ...]
    layer_memory: tuple[float, ...]
    first_time: float = 0.0
    last_time: float = 0.0
    first_memory: float = 0.0
    last_memory: float = 0.0


def balanced_cuts(costs: StageCosts, num_stages: int) -> tuple[int, ...]:
    """Return layer indices ``(0, ..., number of layers)`` that split the model into `num_stages`.

    The slowest stage is as fast as possible, or up to 5% slower if the largest stage then takes
    less memory. Every stage has at least one layer.
    """
    num_layers = len(costs.layer_time)
    assert 1 <= num_stages <= num_layers == len(costs.layer_memory)
    time = _stage_costs(costs.layer_time, costs.first_time, costs.last_time)
    memory = _stage_costs(costs.layer_memory, costs.first_memory, costs.last_memory)
    fastest, _ = _minimax(num_layers, num_stages, time)

    def affordable_memory(start: int, stop: int) -> float:
        slow = time(start, stop) > fastest * _TIME_SLACK
        return float("inf") if slow else memory(start, stop)

    return _minimax(num_layers, num_stages, affordable_memory)[1]


def _stage_costs(layers: Sequence[float], first: float, last: float) -> StageCost:
    sums = [0.0]
    for cost in layers:
        sums.append(sums[-1] + cost)

    def cost_of(start: int, stop: int) -> float:
        ends = (first if start == 0 else 0.0) + (last if stop == len(layers) else 0.0)
        return sums[stop] - sums[start] + ends

    return cost_of


def _minimax(num_layers: int, num_stages: int, cost_of: StageCost) -> tuple[float, tuple[int, ...]]:
    """Return the least possible cost of the largest stage, and balanced boundaries that reach it.

    A stage with more layers never costs less, which bounds the search for its start.
    """
    Found = tuple[float, float, tuple[int, ...]]  # largest, sum of squares, boundaries

    def shortest(best: dict[int, Found], stage: int, stop: int) -> Found:
        nearest: Found | None = None
        for start in range(stop - 1, stage - 2, -1):
            cost = cost_of(start, stop)
            if nearest is not None and cost > nearest[0]:
                break
            largest, squares, cuts = best[start]
            ends = max(largest, cost), squares + cost**2
            if (
                nearest is None
                or ends < nearest[:2]
                or (ends == nearest[:2] and cuts < nearest[2][:-1])
            ):
                nearest = (*ends, (*cuts, stop))
        assert nearest is not None
        return nearest

    best: dict[int, Found] = {
        stop: (cost_of(0, stop), cost_of(0, stop) ** 2, (0, stop))
        for stop in range(1, num_layers + 1)
    }
    for stage in range(2, num_stages + 1):
        best = {stop: shortest(best, stage, stop) for stop in range(stage, num_layers + 1)}
    largest, _, cuts = best[num_layers]
    return largest, cuts


@dataclass(frozen=True, eq=False)  # compared by identity: `stages_of` makes each once
class PlannedStage:
    """Stage `index` of a pipeline: its `layers` by number, and their `kinds`.
    `num_alike` stages have the same kinds in the same order, and this stage comes first."""

    index: int
    layers: range
    kinds: tuple[int, ...]
    is_first: bool
    is_last: bool
    num_alike: int

    @functools.cached_property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """Types of layers with their numbers of layers."""
        return tuple(Counter(self.kinds).items())

    def every(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return `counts` of every `step`-th layer."""
        return self.counts if step == 1 else tuple(Counter(self.kinds[::step]).items())


def stage_layers(model: ModelCosts, num_stages: int, *, balanced: bool) -> list[range]:
    """Return the layers of each stage: balanced by parameters including the head, as in bigtrain,
    or equally many layers per stage, as in Megatron."""
    if balanced:
        return list(_cut(model, num_stages))
    base, num_longer = divmod(len(model.layers), num_stages)
    bounds = [0]
    for stage in range(num_stages):
        bounds.append(bounds[-1] + base + (1 if stage < num_longer else 0))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


@functools.lru_cache(maxsize=256)
def _cut(model: ModelCosts, num_stages: int) -> tuple[range, ...]:
    if num_stages == 1:
        return (range(len(model.layers)),)
    sizes = tuple(float(model.kinds[layer_type].num_parameters) for layer_type in model.layers)
    times = tuple(model.kinds[layer_type].num_active_parameters for layer_type in model.layers)
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


@functools.lru_cache(maxsize=512)
def stages_of(model: ModelCosts, num_stages: int, balanced: bool) -> tuple[PlannedStage, ...]:
    """Return the distinct stages in order: the first stage per group of identical stages."""
    ranges = stage_layers(model, num_stages, balanced=balanced)
    indices_by_kinds: dict[tuple[object, ...], list[int]] = {}
    for index, layers in enumerate(ranges):
        stage_types = tuple(model.layers[layer] for layer in layers)
        key = (stage_types, index == 0, index == len(ranges) - 1)
        indices_by_kinds.setdefault(key, []).append(index)
    return tuple(
        PlannedStage(
            alike[0],
            ranges[alike[0]],
            tuple(model.layers[layer] for layer in ranges[alike[0]]),
            alike[0] == 0,
            alike[0] == len(ranges) - 1,
            len(alike),
        )
        for alike in indices_by_kinds.values()
    )


@dataclass(frozen=True)
class StageSizes:
    """Parameters of a rank of a stage before ZeRO: all and trained parameters, and among both the
    experts'; the largest layer; the share of hidden matrices. `packed` parameters are stored in 4
    bits, in `packed_bytes`."""

    total: float
    total_expert: float
    trained: float
    trained_expert: float
    largest_layer: float
    matrix_share: float
    packed: float = 0.0
    packed_bytes: float = 0.0


def stage_sizes(stage: PlannedStage, model: ModelCosts, layout: Layout) -> StageSizes:
    """Return the sizes of a rank of `stage`. Routers count as matrices, and are small."""
    return _sizes(stage, model, layout.tensor_size, layout.expert_parts)


@functools.lru_cache(maxsize=1 << 14)
def _sizes(
    stage: PlannedStage, model: ModelCosts, tensor_size: int, expert_parts: int
) -> StageSizes:
    dense = expert = frozen = frozen_expert = largest = matrices = 0.0
    for index, count in stage.counts:
        layer = model.kinds[index]
        layer_dense = layer.num_parameters_whole + layer.num_parameters_cut / tensor_size
        experts = layer.num_parameters_expert / expert_parts
        largest = max(largest, layer_dense + experts)
        dense += count * layer_dense
        expert += count * experts
        frozen += count * (layer.num_frozen_whole + layer.num_frozen_cut / tensor_size)
        frozen_expert += count * layer.num_frozen_expert / expert_parts
        matrices += count * sum(m.in_size * m.out_size * m.num_groups * m.count
                                for m in layer.matmuls if not m.is_frozen)  # fmt: skip
    if stage.is_first:
        dense += model.embedding_parameters / tensor_size
        frozen += model.is_embedding_frozen * model.embedding_parameters / tensor_size
    if stage.is_last:
        dense += model.num_other_parameters
        head = model.head_parameters or (0 if stage.is_first else model.embedding_parameters)
        dense += head / tensor_size
        frozen += model.num_frozen_others + model.is_head_frozen * head / tensor_size
    total = dense + expert
    trained_expert = expert - frozen_expert
    trained = total - frozen - frozen_expert
    share = 1.0
    if (tensor_size, expert_parts) != (1, 1):
        share = _sizes(stage, model, 1, 1).matrix_share
    elif total:
        share = min(1.0, matrices / max(1.0, trained))
    if not model.is_frozen:
        return StageSizes(total, expert, trained, trained_expert, largest, share)
    trained = sum(
        count * model.kinds[index].num_adapter_parameters(tensor_size)
        for index, count in stage.counts
    )
    # Copies outside of the layers are counted on the last stage, with the head. Adapters are not
    # parts of experts.
    trained += model.others_outside.trained(tensor_size) if stage.is_last else 0
    packed_counts = [(model.kinds[index].packed, count) for index, count in stage.counts]
    packed = sum(count * packed_weights.num_weights for packed_weights, count in packed_counts)
    num_bytes = sum(count * packed_weights.num_bytes for packed_weights, count in packed_counts)
    return StageSizes(total, expert, trained, 0.0, largest, share, packed, num_bytes)


def block_bytes(sizes: StageSizes, layout: Layout) -> float:
    """Return the bytes of the scales of 8-bit moments, which each rank of a stage has in full."""
    expert = sizes.trained_expert
    full = (sizes.trained - expert) * layout.tensor_size + expert * layout.expert_parts
    return layout.optimizer.block_bytes * full


def matrix_exchange(stage: PlannedStage, model: ModelCosts, layout: Layout) -> tuple[float, float]:
    """Return the mean bytes that a rank of `stage` sends per step to gather the matrices of hidden
    layers at their owners and to return the results (`engine/optimizers/matrix_exchange.py`);
    zeros for optimizers that do not need full matrices.

    Assumes that each rank that shares a matrix has an equal part, as under ZeRO 3 (except for
    the padding) and ZeRO 0. ZeRO 1 and 2 split the model once for each rank, and an owner may have
    all of a matrix or nothing: with few matrices the result is inexact. Routers count as
    matrices.
    """
    optimizer = layout.optimizer
    if not optimizer.needs_whole_matrices:
        return 0.0, 0.0
    gather_elements = return_elements = 0.0
    for layer_type, alike in stage.counts:
        for product in model.kinds[layer_type].matmuls:
            if product.is_frozen:
                continue
            replicas, cut = layout.partition_size, layout.tensor_size
            size: float = (
                alike * product.count * product.num_groups * product.in_size * product.out_size
            )
            if product.num_groups > 1 and layout.expert_size > 1:
                # Each rank has some experts, unsharded.
                size /= layout.expert_size
                replicas, cut = layout.expert_replicas, 1
            elif product.cut is None and product.num_groups == 1:
                cut = 1
            ranks = replicas * layout.tensor_size
            # For a matrix: replicas of an element, and the owner's part.
            copies = layout.tensor_size / cut * (1 if layout.zero_stage else replicas)
            part = 1 / (cut * (replicas if layout.zero_stage else 1))
            missing = 1 - 1 / (ranks if layout.zero_stage else layout.tensor_size)
            gather_elements += size * missing / ranks
            return_elements += size * (copies - part) / ranks
    return optimizer.wire_bytes * gather_elements, optimizer.wire_bytes * return_elements


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes that sequence parallelism exchanges per rank, layer and micro-batch. heads: of queries,
    keys, values and outputs, which Ulysses exchanges, and their gradients in the backward pass,
    except for the part that a rank keeps. keys: of keys and values, which a ring exchanges in both
    passes; gradients: of the keys' and values' gradients in float32, in the backward pass. Under a
    causal mask without documents and windows a rank needs the keys of three of four chunks per peer
    on average (`bigtrain.models.parallel.ring_plan`); documents and windows need fewer."""

    heads: float
    keys: float
    gradients: float


def sequence_bytes(
    attention: Attention,
    num_tokens: float,
    element_bytes: int,
    *,
    tensor_size: int,
    ulysses_size: int,
) -> SequenceBytes:
    """Return the bytes of a rank's `num_tokens`. Where Ulysses' ranks outnumber the key heads of
    a rank, keys are copied."""
    key_heads = attention.num_key_value_heads / tensor_size
    if ulysses_size > 1 and key_heads >= 1:
        key_heads = math.lcm(int(key_heads), ulysses_size)
    width = attention.head_size + attention.value_size
    num_keys = num_tokens * key_heads * width
    num_head_elements = num_tokens * attention.num_heads / tensor_size * width + num_keys
    return SequenceBytes(
        heads=num_head_elements * element_bytes,
        keys=num_keys * element_bytes,
        gradients=num_keys * 4,
    )
