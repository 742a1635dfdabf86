"""Division of recurrent layers among tensor-parallel ranks: each rank computes some of the heads.

transformers' plans leave these layers unsharded, or gather what their projections return. Here the
projections, convolutions, decays and gates are divided by heads (by channels, where a layer has no
heads). A projection of several parts, for example z, x, B, C and dt of Mamba 2, is divided part by
part. Layers are known by the functions that they call (`recurrence.functions`) and by the names of
their parameters in transformers' files (5.23); a layer with any further parameter is not divided.
`bigtrain.models.equivalence.tensor_parallel` compares the division with the unsharded model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from bigtrain.errors import ModelError
from bigtrain.models.layers.recurrence.functions import (
    CHANNELS,
    CONVOLUTION,
    FUNCTIONS,
    MATRIX,
    SCALAR,
    VECTOR,
    layers_with_functions,
)
from bigtrain.models.parallel.sharding import Shard
from bigtrain.models.transformers_patches import functions_called

COLWISE, ROWWISE = "recurrent_colwise", "recurrent_rowwise"
ROWWISE_TO_SHARES = "recurrent_rowwise_to_shares"
NORM, LAYER = "recurrent_norm", "recurrent_layer"
"""Styles of modules and parameters in a plan. ROWWISE_TO_SHARES: a rowwise layer the output of
which, a sum over ranks, every rank's heads read completely (``x_proj`` of Mamba 1)."""
STYLES = frozenset({COLWISE, ROWWISE, ROWWISE_TO_SHARES, NORM, LAYER})
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Leaf:
    """How a parameter is divided along dimension `dim`, which consists of blocks of sizes `parts`:
    a rank gets an equal share of every block."""

    style: str
    parts: tuple[int, ...]
    dim: int = 0


@dataclass(frozen=True)
class Division:
    """The division of a layer.

    leaves: divided parameters, by name in the layer. heads: counts that have to be multiples of the
    degree, by the layer's attribute. local: maps the degree to the attributes of a rank's layer and
    its modules. partial: unsharded parameters of which each rank computes a part of the gradient.
    whole: unsharded parameters with the full gradient on every rank. groups: number of groups of
    heads that share B and C (Mamba 2); may be smaller than the degree; 0 without groups. norm: the
    module that normalizes over channels of several ranks if there are fewer groups than ranks.
    buffers: sizes of the divided blocks of a buffer, by name in the layer.
    """

    leaves: Mapping[str, Leaf]
    heads: Mapping[str, int]
    local: Callable[[int], Mapping[str, int]]
    partial: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    groups: int = 0
    norm: str = ""
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_equal_parts(self) -> int:
        """Largest number that divides all counts of heads and sizes of blocks. A degree that
        divides it gives ranks complete heads and equal shares."""
        parts = [part for leaf in self.leaves.values() for part in leaf.parts]
        return math.gcd(*self.heads.values(), *parts)

    def problem(self, size: int) -> str:
        """Return why `size` ranks cannot divide the layer; empty if they can."""
        for attribute, count in self.heads.items():
            if count % size:
                return f"{attribute} = {count} is not a multiple of {size}"
        if self.groups and self.groups % size and size % self.groups:
            return f"n_groups = {self.groups} and {size} ranks: neither is a multiple of the other"
        for name, leaf in self.leaves.items():
            indivisible = [part for part in leaf.parts if part % size]
            if indivisible:
                return f"{name} has {indivisible[0]} rows of one kind, not a multiple of {size}"
        return ""

    def shard(self, name: str, shape: tuple[int, ...], rank: int, size: int) -> Shard:
        """Return the shard of parameter `name` on `rank`. Raises ModelError if `size` ranks cannot
        divide the layer."""
        reason = self.problem(size)
        if reason:
            nearest = max(n for n in range(1, size) if not self.problem(n))
            raise ModelError(
                f"parallel.tensor = {size}: a recurrent layer cannot be divided: {reason} -> "
                f"nearest: {nearest}"
            )
        leaf = self.leaves[name]
        ranges = ranges_of(leaf.parts, rank, size)
        return Shard(shape, leaf.dim, ranges, sum(leaf.parts) // size, primary=True)


def ranges_of(parts: tuple[int, ...], rank: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the rows [start, stop) of `rank` in each of consecutive blocks of sizes `parts`."""
    starts = [sum(parts[:number]) for number in range(len(parts))]
    return tuple(
        (start + part * rank // size, start + part * (rank + 1) // size)
        for start, part in zip(starts, parts, strict=True)
    )


# --- layers ---


def _weight_and_bias(style: str, name: str, parts: tuple[int, ...]) -> dict[str, Leaf]:
    """Return how weight and bias of linear layer or convolution `name` are divided; a rowwise
    layer's bias is not."""
    if style == COLWISE:
        return {f"{name}.weight": Leaf(style, parts), f"{name}.bias": Leaf(style, parts)}
    return {f"{name}.weight": Leaf(style, parts, dim=1)}


def _convolution_channels(name: str, count: int) -> dict[str, int]:
    """Return the attributes of depthwise convolution `name` with `count` channels."""
    return dict.fromkeys((f"{name}.in_channels", f"{name}.out_channels", f"{name}.groups"), count)


def _mamba2(layer: Any) -> Division:
    """Bamba, Granite 4, Nemotron-H, Falcon-H1, Mamba 2, Zamba2. Ranks that share a group hold parts
    of the states in B and C, and exchange the parts after the convolution."""
    inner, heads = layer.intermediate_size, layer.num_heads
    groups, states = layer.n_groups, layer.n_groups * layer.ssm_state_size
    projected = (inner, inner, states, states, heads)  # z, x, B, C, dt
    per_head = {name: Leaf(COLWISE, (heads,)) for name in ("A_log", "D", "dt_bias")}

    # Ranks that share a group have one group each, with a part of the states.
    def local(size: int) -> dict[str, int]:
        local_groups = max(1, groups // size)
        return {
            "num_heads": heads // size,
            "intermediate_size": inner // size,
            "n_groups": local_groups,
            "ssm_state_size": states // size // local_groups,
            "conv_dim": layer.conv_dim // size,
            "norm.group_size": inner // size // local_groups,
            "norm.n_groups": local_groups,
            **_convolution_channels("conv1d", layer.conv_dim // size),
        }

    return Division(
        leaves={
            **_weight_and_bias(COLWISE, "in_proj", projected),
            **_weight_and_bias(COLWISE, "conv1d", (inner, states, states)),
            **_weight_and_bias(ROWWISE, "out_proj", (inner,)),
            **per_head,
            "norm.weight": Leaf(COLWISE, (inner,)),
        },
        heads={"num_heads": heads},
        local=local,
        whole=("out_proj.bias",),
        groups=groups,
        norm="norm",
        buffers={"mup_vector": projected},
    )


def _delta_rule(layer: Any) -> Division:
    """Qwen3-Next, Qwen3.5, OLMo hybrid: key heads, each with as many value heads."""
    key, value, heads = layer.key_dim, layer.value_dim, layer.num_v_heads
    blocks_by_name = {
        "in_proj_qkv": (key, key, value),
        # q, k, v and z (b and a) are interleaved by key heads: one block.
        "in_proj_qkvz": (2 * key + 2 * value,),
        "in_proj_ba": (2 * heads,),
        "conv1d": (key, key, value),
        **dict.fromkeys(("q_proj", "k_proj"), (key,)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (value,)),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj"), (heads,)),
    }
    leaves = {name: Leaf(COLWISE, (heads,)) for name in ("A_log", "dt_bias")}
    for name, parts in blocks_by_name.items():
        leaves |= _weight_and_bias(COLWISE, name, parts)
    for name in ("out_proj", "o_proj"):
        leaves |= _weight_and_bias(ROWWISE, name, (value,))

    def local(size: int) -> dict[str, int]:
        names = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
        divided = {name: getattr(layer, name) // size for name in names}
        return divided | _convolution_channels("conv1d", divided["conv_dim"])

    return Division(
        leaves,
        heads={"num_k_heads": layer.num_k_heads, "num_v_heads": heads},
        local=local,
        partial=("norm.weight", "o_norm.weight"),
    )


def _kimi_delta_rule(layer: Any) -> Division:
    """Kimi Linear: a decay for each channel, from a product of two small matrices."""
    width, heads = layer.qkv_dim, layer.num_heads
    leaves = {
        "forget_gate.A_log": Leaf(COLWISE, (heads,), dim=2),
        "forget_gate.dt_bias": Leaf(COLWISE, (width,)),
        **_weight_and_bias(COLWISE, "conv1d", (width,) * 3),
        **_weight_and_bias(COLWISE, "b_proj", (heads,)),
        **_weight_and_bias(ROWWISE, "o_proj", (width,)),
    }
    for name in ("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj"):
        leaves |= _weight_and_bias(COLWISE, name, (width,))

    def local(size: int) -> dict[str, int]:
        divided = {"num_heads": heads // size, "qkv_dim": width // size}
        gate = {f"forget_gate.{name}": value for name, value in divided.items()}
        conv_dim = layer.conv_dim // size
        return {
            **divided,
            **gate,
            "conv_dim": conv_dim,
            **_convolution_channels("conv1d", conv_dim),
        }

    return Division(
        leaves,
        heads={"num_heads": heads},
        local=local,
        partial=("o_norm.weight",),
        whole=("g_a_proj.weight", "forget_gate.f_a_proj.weight"),
    )


def _mamba1(layer: Any) -> Division:
    """Mamba, Falcon Mamba, Jamba: by channels. All channels contribute to B, C and the time steps,
    and read them."""
    inner = layer.intermediate_size
    return Division(
        leaves={
            **_weight_and_bias(COLWISE, "in_proj", (inner, inner)),
            **_weight_and_bias(COLWISE, "conv1d", (inner,)),
            **_weight_and_bias(ROWWISE_TO_SHARES, "x_proj", (inner,)),
            **_weight_and_bias(COLWISE, "dt_proj", (inner,)),
            **_weight_and_bias(ROWWISE, "out_proj", (inner,)),
            "A_log": Leaf(COLWISE, (inner,)),
            "D": Leaf(COLWISE, (inner,)),
        },
        heads={"intermediate_size": inner},
        local=lambda size: {
            "intermediate_size": inner // size,
            **_convolution_channels("conv1d", inner // size),
        },
        partial=tuple(f"{name}_layernorm.weight" for name in ("dt", "b", "c")),
        whole=("out_proj.bias",),
    )


def _short_convolution(layer: Any) -> Division:
    """LFM2 and 3: ``C * conv(B * x)``, by channels."""
    width = layer.conv.in_channels
    return Division(
        leaves={
            **_weight_and_bias(COLWISE, "in_proj", (width,) * 3),
            **_weight_and_bias(COLWISE, "conv", (width,)),
            **_weight_and_bias(ROWWISE, "out_proj", (width,)),
        },
        heads={"conv.in_channels": width},
        local=lambda size: _convolution_channels("conv", width // size),
        whole=("out_proj.bias",),
    )


def _rg_lru(block: Any) -> Division:
    """RecurrentGemma: by blocks of channels with a matrix of gates each, which are called heads."""
    width, heads = block.lru_width, block.rg_lru.num_attention_heads
    gates = (f"rg_lru.{gate}_gate" for gate in ("input", "recurrent"))
    return Division(
        leaves={
            **_weight_and_bias(COLWISE, "linear_x", (width,)),
            **_weight_and_bias(COLWISE, "linear_y", (width,)),
            **_weight_and_bias(COLWISE, "conv_1d", (width,)),
            **_weight_and_bias(ROWWISE, "linear_out", (width,)),
            "rg_lru.recurrent_param": Leaf(COLWISE, (width,)),
            **{f"{gate}_{end}": Leaf(COLWISE, (heads,)) for gate in gates for end in _GATE_ENDS},
        },
        heads={"rg_lru.num_attention_heads": heads},
        local=lambda size: {
            "lru_width": width // size,
            "rg_lru.num_attention_heads": heads // size,
            **_convolution_channels("conv_1d", width // size),
        },
        whole=("linear_out.bias",),
    )


_GATE_ENDS = ("weight", "bias")


def division_of(layer: nn.Module, called_names: set[str]) -> Division | None:
    """Return how `layer`, which calls functions of `FUNCTIONS`, is divided; None if it cannot be.
    `layer`: the unsharded layer, also if only a part of the layer calls the function
    (`_rnn_scan`)."""
    functions = [FUNCTIONS[name] for name in called_names & FUNCTIONS.keys()]
    function_kinds = {function.kind for function in functions} - {CONVOLUTION}
    divide_by_kinds: dict[frozenset[str], Callable[[Any], Division]] = {
        frozenset({SCALAR}): _mamba2,
        frozenset({MATRIX}): _delta_rule,
        frozenset({VECTOR}): _mamba1,
        frozenset({CHANNELS}): _rg_lru,
        frozenset(): _short_convolution,
    }
    divide = divide_by_kinds.get(frozenset(function_kinds))
    if "chunk_kimi_delta_attention" in called_names:  # has the kind of `_delta_rule`
        divide = _kimi_delta_rule
    if divide is None:
        return None
    try:
        division = divide(layer)
    except AttributeError:  # the layer lacks an attribute of the layers that `divide` names
        return None
    expected_names = {*division.leaves, *division.partial, *division.whole}
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    # A class with equal attributes may have parameters of another shape, or of fewer dimensions,
    # for which the slice is empty.
    fits = all(
        shapes[name][leaf.dim : leaf.dim + 1] == (sum(leaf.parts),)
        for name, leaf in division.leaves.items()
        if name in shapes
    )
    return division if fits and shapes.keys() <= expected_names else None


_CALLED_IN_PARTS = {"_rnn_scan"}
"""Functions that a child of the divided layer calls."""


def recurrent_divisions(model: nn.Module) -> Iterator[tuple[str, nn.Module, Division]]:
    """Yield the layers of an unsharded `model` that can be divided, with their names."""
    for name, module, called_names in layers_with_functions(model):
        layer_name = name.rpartition(".")[0] if called_names & _CALLED_IN_PARTS else name
        layer = module if layer_name == name else model.get_submodule(layer_name)
        division = division_of(layer, called_names)
        if division is not None:
            yield layer_name, layer, division


def leaf_of(model: nn.Module, name: str) -> tuple[str, Division]:
    """Find the recurrent layer of an unsharded `model` that contains parameter `name`. Return the
    parameter's name in the layer, and the layer's division."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):  # from the innermost module outwards
        layer = model.get_submodule(".".join(parts[:count]))
        called_names = functions_called(layer, FUNCTIONS) - _CALLED_IN_PARTS
        for child in layer.children():
            called_names |= functions_called(child, _CALLED_IN_PARTS)
        division = division_of(layer, called_names) if called_names else None
        if division is not None:
            return ".".join(parts[count:]), division
    raise AssertionError(name)


def recurrent_plan(model: nn.Module, adapted: Collection[str] = ()) -> dict[str, str]:
    """Return the styles of the parameters and modules of the recurrent layers of `model` by name,
    which replace the styles in transformers' plan. The result lacks layers with adapters, which
    cannot be divided, and layers that contain a module of `adapted` (names)."""
    plan: dict[str, str] = {}
    for layer_name, layer, division in recurrent_divisions(model):
        if any(module_name.startswith(f"{layer_name}.") for module_name in adapted):
            continue
        for name, _ in layer.named_parameters():
            if name in division.leaves:
                plan[f"{layer_name}.{name}"] = division.leaves[name].style
            else:
                is_partial = name in division.partial
                plan[f"{layer_name}.{name}"] = _PARTIAL_GRADIENT if is_partial else "replicate"
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                weight = division.leaves.get(f"{name}.weight")
                plan[f"{layer_name}.{name}"] = "replicate" if weight is None else weight.style
        if division.norm and isinstance(getattr(layer, division.norm, None), nn.Module):
            plan[f"{layer_name}.{division.norm}"] = NORM
        plan[layer_name] = LAYER
    return plan
