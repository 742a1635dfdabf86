"""Tensor parallelism of any Hugging Face causal LM by the model's plan.

The plan (``base_model_tp_plan`` of the configuration, ``_tp_plan`` of class and instance) gives
modules and parameters a style. This module implements every style that transformers 5.23 registers,
except `sequence_parallel`, which no plan uses, on plain local tensors: transformers' code uses
DTensors, which ZeRO does not support. `bigtrain.models.equivalence.tensor_parallel` tests whether a
plan is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import ModelError
from bigtrain.models.configuration import text_config
from bigtrain.models.layers.adapter_names import base_name, computing_modules, has_adapters
from bigtrain.models.layers.float8 import product_of
from bigtrain.models.layers.parameters import output_layer
from bigtrain.models.parallel.adapters import (
    Side,
    adapted_names,
    cut_adapter,
    cut_stacked_adapters,
    draw_whole_masks,
)
from bigtrain.models.parallel.collectives import (
    Group,
    gather_last,
    split_last,
    sum_gradient,
    sum_partial,
    summed,
)
from bigtrain.models.parallel.grouped_experts import GROUPED_UNIT
from bigtrain.models.parallel.recurrent_divisions import (
    COLWISE,
    LAYER,
    NORM,
    ROWWISE,
    ROWWISE_TO_SHARES,
    STYLES,
    leaf_of,
    recurrent_divisions,
    recurrent_plan,
)
from bigtrain.models.parallel.recurrent_layers import divide_layer
from bigtrain.models.parallel.sharding import (
    Shard,
    even_ranges,
    is_expert,
    padded_range,
    shard_of,
    tag_shard,
)
from bigtrain.models.torch_patches import shadow
from bigtrain.models.transformers_patches import expanded_plan, style_of

Plan = dict[str, str]

_GATHERED = {"colwise_gather_output", "colwise_rep"}
_SPLIT_INPUT = {"rowwise_split_input", "rowwise_rep"}
_COLWISE = {"colwise", "packed_colwise"} | _GATHERED
_ROWWISE = {"rowwise", "packed_rowwise"} | _SPLIT_INPUT
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
_UNSHARDED = {
    _PARTIAL_GRADIENT,
    "moe_tp_experts",
    "moe_identity_expert",
    "mla_kv_a_proj",
    "all_reduce",
    "local_params",
    "replicate",
}
_KEY_VALUE = ("k_proj", "v_proj")
ADAPTED = _COLWISE | _ROWWISE | {"mla_kv_a_proj", "replicate"}
"""Styles of layers that can have adapters."""


def tensor_plan(model: PreTrainedModel, adapted: Collection[str] = ()) -> Plan:
    """Return the style of every module and parameter by concrete name, parameters before their
    module. Call it before a pipeline stage removes layers. `adapted`: names of layers that will get
    adapters, since recurrent layers with adapters are not divided by heads. Raises ModelError for
    an architecture without a plan."""
    rules = dict(model.tp_plan or {})
    plan = expanded_plan(model, rules)
    if has_adapters(model):
        # Layers that peft has wrapped, by their names in the model without adapters.
        parameter_names = [
            base_name(name) for name, _ in model.named_parameters(remove_duplicate=False)
        ]
        styles = {name: style_of(rules, name, is_parameter=True) for name in parameter_names}
        for name in computing_modules(model):
            styles[name] = style_of(rules, name, is_parameter=False)
        plan = {**{name: style for name, style in styles.items() if style is not None}, **plan}
    plan |= recurrent_plan(model, adapted)
    # If only the head or only the embedding that is tied to the head has a rule, both get one.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and embedding is not None and head.weight is embedding.weight:
        head_name, *_ = _names_of(model, head)
        table_name, *_ = _names_of(model, embedding)
        if plan.get(head_name) in _GATHERED and table_name not in plan:
            plan |= {f"{table_name}.weight": "embedding_rowwise", table_name: "embedding_rowwise"}
        elif plan.get(table_name) == "embedding_rowwise" and head_name not in plan:
            for leaf, _ in head.named_parameters(recurse=False):
                plan[f"{head_name}.{leaf}"] = "colwise_gather_output"
            plan[head_name] = "colwise_gather_output"
    # A plan for only the head and the embedding divides no layer.
    head_names = _names_of(model, output_layer(model))
    embedding_names = _names_of(model, model.get_input_embeddings())
    parents = {name.rpartition(".")[0] for name in plan}
    if not parents - {*head_names, *embedding_names, ""}:
        raise ModelError(
            f"parallel.tensor: transformers has no tensor-parallel plan for model_type "
            f"{model.config.model_type} -> parallel.tensor=1, and ZeRO 3 for models too large for "
            "one device"
        )
    return plan


def known_plan(model: PreTrainedModel, adapted: Collection[str] = ()) -> Plan:
    """Return `tensor_plan`; empty for an architecture without one."""
    try:
        return tensor_plan(model, adapted)
    except ModelError:
        return {}


def _names_of(model: nn.Module, module: nn.Module | None) -> list[str]:
    """Return all names of `module` in `model`; several for a shared module."""
    named_modules = model.named_modules(remove_duplicate=False)
    return [name for name, candidate in named_modules if candidate is module]


def shard_model(model: PreTrainedModel, plan: Plan, group: Group) -> None:
    """Make `model` compute one rank's part: forwards exchange over `group`, parameters are
    tagged with their shards.

    No weights move: the caller that fills the parameters splits them (`sharding.cut_parameter`),
    and the model must not be called before. Skips names that the model lacks (another pipeline
    stage has them) and experts that expert-parallel ranks divide (`experts.shard_experts`). Not
    collective. Raises ModelError for a plan that cannot be carried out.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    modules = computing_modules(model)
    adapted = set(adapted_names(model))
    # Tag the parameters, and complete the gradients of parameters that several ranks hold.
    for name, style, parameter in _styled_parameters(model, plan):
        if is_expert(parameter):
            continue
        shape = tuple(parameter.shape)
        shard = _shard_of_style(model, name, style, shape, rank=rank, size=size)
        tagged = shard_of(parameter)
        if tagged is not None:
            if tagged != shard:
                raise ModelError(
                    f"parallel.tensor: tied weight {name} would be sharded in two ways"
                )
            continue
        tag_shard(parameter, shard)
        if parameter.requires_grad and style == _PARTIAL_GRADIENT:
            parameter.register_hook(lambda gradient: summed(gradient, group))
        if parameter.requires_grad and _is_shared_key_value(model, name, style, size):
            parameter.register_hook(_sum_of_holders(shard, group))
    # Replace the forwards.
    if has_adapters(model):
        cut_stacked_adapters(model, group)
    for name, layer, division in list(recurrent_divisions(model)):
        if plan.get(name) == LAYER:
            divide_layer(layer, division, group)
    for name, style in plan.items():
        if name not in modules or getattr(modules[name], "is_placeholder", False):
            continue
        if name in adapted:
            _cut_adapted(model, name, modules[name], style, group)
        else:
            _wrap(model, name, modules[name], style, group)
    # If several ranks share a key-value head, each has a part of its query heads.
    num_heads = _shared_key_value_heads(model, size)
    if not num_heads:
        return
    num_holders = size // num_heads
    for name in plan:
        parent, _, leaf = name.rpartition(".")
        if leaf != "k_proj" or name not in modules or plan[name] != "colwise":
            continue
        attention: Any = modules[parent]
        groups = getattr(attention, "num_key_value_groups", None)
        if not isinstance(groups, int) or groups % num_holders:
            raise ModelError(
                f"parallel.tensor: {parent}: {num_heads} key-value heads cannot be shared by "
                f"{size} ranks -> parallel.tensor={num_heads}"
            )
        attention.num_key_value_groups = groups // num_holders


def check_shards(model: PreTrainedModel, plan: Plan, size: int) -> None:
    """Raise ModelError for a parameter that cannot be split into `size` shards. Moves no
    weights."""
    for name, style, parameter in _styled_parameters(model, plan):
        _shard_of_style(model, name, style, tuple(parameter.shape), rank=0, size=size)


def _styled_parameters(
    model: PreTrainedModel, plan: Plan
) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield every parameter with its name in the model without adapters and its style."""
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        name = base_name(full_name)
        yield name, plan.get(name, "replicate"), parameter


def _shard_of_style(
    model: PreTrainedModel, name: str, style: str, shape: tuple[int, ...], *, rank: int, size: int
) -> Shard:
    """Return the shard that `rank` of `size` ranks holds of a parameter with this `shape`."""
    full_shard = Shard(shape, primary=rank == 0)
    if style in _UNSHARDED or not shape:
        return full_shard
    if style in STYLES:
        leaf, division = leaf_of(model, name)
        return division.shard(leaf, shape, rank, size)
    is_bias = name.rpartition(".")[2].endswith("bias")

    # The dimension that the style divides.
    if style in ("embedding_rowwise", "embedding_colwise"):
        dim = 0 if style == "embedding_rowwise" else 1
    elif style in _COLWISE:
        dim = len(shape) - 1 if is_bias else max(len(shape) - 2, 0)
    elif style in _ROWWISE:
        if is_bias or (len(shape) == 1 and style == "packed_rowwise"):
            return full_shard
        dim = len(shape) - 1
    else:
        raise ModelError(f"parallel.tensor: {name}: unknown style {style!r} in the model's plan")

    # Outputs that are gathered are padded; key and value heads may be shared by several ranks.
    if style in _GATHERED or style.startswith("embedding"):
        (begin, end), padded_rows = padded_range(shape[dim], size, rank)
        rows = ((begin, end),) if begin < end else ()
        return Shard(shape, dim, rows, padded_rows, primary=True)
    if _is_shared_key_value(model, name, style, size):
        num_heads = _shared_key_value_heads(model, size)
        num_holders, head_width = size // num_heads, shape[dim] // num_heads
        head = rank // num_holders
        span = (head * head_width, (head + 1) * head_width)
        return Shard(shape, dim, (span,), head_width, primary=rank % num_holders == 0)

    # Other shards have no padding. They may differ in width, except around a dropout. A packed
    # parameter consists of two matrices, each of which is split.
    packed = 2 if style.startswith("packed") else 1
    width = shape[dim] // packed
    dropout = _inner_dropout(model, name) if width % size else None
    if dropout is not None:
        raise ModelError(
            f"parallel.tensor: {name} {list(shape)}: with dropout between its layers ({dropout}), "
            f"{size} ranks need equally wide parts, or their random streams diverge -> a degree "
            f"that divides {width}, or no dropout"
        )
    if shape[dim] % packed or width < size:
        raise ModelError(
            f"parallel.tensor: {name} {list(shape)}: dimension {dim} cannot be split into {packed} "
            f"x {size} parts -> parallel.tensor={max(1, width)} or less"
        )
    # Stacked experts are split in units of grouped products, if there are enough units.
    is_stacked = len(shape) + is_bias == 3  # [experts, out, in], or a bias [experts, out]
    unit = GROUPED_UNIT if is_stacked else 1
    if width % unit or width // unit < size:
        unit = 1
    first_unit, end_unit = even_ranges(width // unit, size, rank)
    begin, end = first_unit * unit, end_unit * unit
    ranges = tuple((n * width + begin, n * width + end) for n in range(packed))
    return Shard(shape, dim, ranges, packed * (end - begin), primary=True)


def _inner_dropout(model: PreTrainedModel, name: str) -> str | None:
    """Return a dropout, if any, that may act on the output of the sharded parameter `name`: a
    module or a number of the block that holds the layer. Elsewhere dropout acts on full hidden
    states or full heads, for which all ranks draw equally many numbers."""
    block_name = name.rpartition(".")[0].rpartition(".")[0]
    for prefix, module in model.get_submodule(block_name).named_modules(prefix=block_name):
        if ".lora_dropout." in prefix:
            continue  # draws for full inputs
        if isinstance(module, nn.Dropout) and module.p > 0 and "att" not in prefix:
            return f"{prefix}.p = {module.p}"
        for key, value in vars(module).items():
            if isinstance(value, float) and value > 0 and "drop" in key and "att" not in key:
                return f"{prefix}.{key} = {value}"
    return None


# --- fewer key-value heads than ranks: several ranks share a head ---


def _shared_key_value_heads(model: PreTrainedModel, size: int) -> int:
    """Return the number of key-value heads if each is shared by several of `size` ranks; else 0."""
    num_heads = getattr(text_config(model.config), "num_key_value_heads", None)
    if not isinstance(num_heads, int):
        return 0
    return num_heads if num_heads < size and size % num_heads == 0 else 0


def _is_shared_key_value(model: PreTrainedModel, name: str, style: str, size: int) -> bool:
    """Return whether several ranks hold equal parts of the parameter `name`."""
    leaf = name.split(".")[-2] if "." in name else ""
    return style == "colwise" and leaf in _KEY_VALUE and _shared_key_value_heads(model, size) > 0


def _sum_of_holders(shard: Shard, group: Group) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook that sums the gradient of a shard over the ranks that hold it."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        # Sum full gradients, with zeros outside of the shard: there is no group of the holders.
        assert shard.dim is not None
        [(begin, end)] = shard.ranges
        full = gradient.new_zeros(shard.shape)
        full.narrow(shard.dim, begin, end - begin).copy_(gradient)
        dist.all_reduce(full, group=group)
        return full.narrow(shard.dim, begin, end - begin).contiguous()

    return hook


# --- forwards ---


def _wrap(model: Any, name: str, module: Any, style: str, group: Group) -> None:
    wrapped = _wrapped(model, name, module, style, group)
    if wrapped is not None:
        shadow(module, "forward", wrapped)


def _cut_adapted(model: Any, name: str, layer: Any, style: str, group: Group) -> None:
    """Wrap a layer with an adapter, whose base weight is tagged, and shard the adapter."""
    if style not in ADAPTED:
        raise ModelError(
            f"adapters.targets: {name}: adapters are not supported on a layer of style {style!r} "
            "in the model's tensor-parallel plan -> remove it, or parallel.tensor=1"
        )
    if style in _UNSHARDED:
        _wrap(model, name, layer, style, group)
        return
    _wrap(model, name, layer.base_layer, style, group)
    side: Side = "outputs" if style in _COLWISE else "inputs"
    cut, parameters = cut_adapter(layer, side, group, is_gathered=style in _GATHERED)
    if _is_shared_key_value(model, f"{name}.weight", style, dist.get_world_size(group)):
        for parameter in parameters:
            parameter.register_hook(_sum_of_holders(_shard(parameter), group))
    if style in _ROWWISE - _SPLIT_INPUT:
        draw_whole_masks(layer)
    _wrap(model, name, cut, style, group)


def _wrapped(model: Any, name: str, module: Any, style: str, group: Group) -> Any:
    """Return the replacement of the module's forward; None to keep it."""
    forward = module.forward
    if style in _GATHERED:
        shard = _shard(module.weight)
        assert shard.dim is not None
        full_width = shard.shape[shard.dim]
        return lambda x, *a, **k: gather_last(
            forward(sum_gradient(x, group), *a, **k), full_width, group
        )
    if style in _COLWISE or style == COLWISE:
        return lambda x, *a, **k: forward(sum_gradient(x, group), *a, **k)
    if style in _SPLIT_INPUT:
        inner = _rowwise(name, module, forward, group)
        span = _shard(module.weight).ranges[0]
        return lambda x, *a, **k: inner(split_last(x, span, group), *a, **k)
    if style in _ROWWISE or style == ROWWISE:
        return _rowwise(name, module, forward, group)
    if style == ROWWISE_TO_SHARES:
        inner = _rowwise(name, module, forward, group)
        return lambda x: sum_gradient(inner(x), group)
    if style == "embedding_rowwise":
        return _vocabulary_parallel(module, forward, group)
    if style == "embedding_colwise":
        width = _shard(module.weight).shape[1]
        return lambda x, *a, **k: gather_last(forward(x, *a, **k), width, group)
    if style == "moe_tp_experts":
        return _experts(forward, group)
    if style == "moe_identity_expert":
        # The output is summed with the experts' outputs, which are partial.
        return lambda x, *a, **k: forward(x / dist.get_world_size(group), *a, **k)
    if style == "mla_kv_a_proj":
        rope = int(text_config(model.config).qk_rope_head_dim)
        return _compressed_key_value(forward, rope, group)
    if style == "all_reduce":
        return lambda *a, **k: sum_partial(forward(*a, **k), group)
    if style not in _UNSHARDED and style not in (LAYER, NORM):  # divided by `divide_layer`
        raise ModelError(f"parallel.tensor: {name}: unknown style {style!r} in the model's plan")
    return None


def _shard(parameter: nn.Parameter) -> Shard:
    shard = shard_of(parameter)
    assert shard is not None
    return shard


def _rowwise(name: str, module: Any, forward: Any, group: Group) -> Any:
    """Return a forward that sums the ranks' partial products, and then adds the bias once."""
    if getattr(module, "bias", None) is None:
        return lambda x, *a, **k: sum_partial(forward(x, *a, **k), group)
    if type(module) is not nn.Linear:
        raise ModelError(
            f"parallel.tensor: {name}: rowwise for a {type(module).__name__} with a bias is not "
            "known here -> parallel.tensor=1"
        )
    product = product_of(module)
    return lambda x: sum_partial(product(x, module.weight), group) + module.bias


def _vocabulary_parallel(module: Any, forward: Any, group: Group) -> Any:
    """Return a forward that looks up the ids of this rank's rows, with zeros for other ids, and
    sums over the ranks."""
    num_rows = _shard(module.weight).local_size
    first_row = dist.get_rank(group) * num_rows
    padding_id = module.padding_idx
    if padding_id is not None:
        num_ids = _shard(module.weight).shape[0]
        padding_row = padding_id % num_ids - first_row  # a negative id counts from the end
        module.padding_idx = padding_row if 0 <= padding_row < num_rows else None

    def lookup(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_elsewhere = (ids < first_row) | (ids >= first_row + num_rows)
        embedded = forward((ids - first_row).masked_fill(is_elsewhere, 0), *args, **kwargs)
        return sum_partial(embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)

    return lookup


def _experts(forward: Any, group: Group) -> Any:
    """Return a forward of experts, of each of which every rank has a slice. Arguments: hidden
    states, chosen experts, their weights, ..."""

    def run(hidden: Any, *routing: Any, **kwargs: Any) -> Any:
        shared = [sum_gradient(value, group) for value in routing]
        named = {key: sum_gradient(value, group) for key, value in kwargs.items()}
        output = forward(sum_gradient(hidden, group), *shared, **named)
        return None if output is None else sum_partial(output, group)

    return run


def _compressed_key_value(forward: Any, rope: int, group: Group) -> Any:
    """Return a forward that sums the gradient of the rotary part over the ranks: all heads, which
    ranks divide, read that part directly."""

    def project(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(x, *args, **kwargs)
        compressed, rotary = output.split([output.shape[-1] - rope, rope], -1)
        return torch.cat([compressed, sum_gradient(rotary, group)], -1)

    return project
