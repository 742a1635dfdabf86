"""Adapters on layers that tensor parallelism shards, by peft's rule.

On a column-parallel layer ``lora_A`` is replicated and ``lora_B`` is sharded like the layer; on a
row-parallel layer ``lora_B`` is replicated. The sharded matrix is called like a layer of that
style, so the gradients of the replicated matrix are complete on every rank. The two matrices of a
stacked weight are not called but multiplied: there ranks sum the replicated matrix's gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from bigtrain.errors import ModelError
from bigtrain.models.layers.adapter_names import ADAPTER, parameter_layers
from bigtrain.models.layers.adapter_targets import LINEAR
from bigtrain.models.parallel.collectives import Group, gather_last, summed
from bigtrain.models.parallel.sharding import Shard, shard_of, tag_shard
from bigtrain.models.torch_patches import shadow

Side = Literal["outputs", "inputs"]


def adapted_names(model: nn.Module) -> list[str]:
    """Return names of the linear layers of `model` that have adapters."""
    layers = ((name, getattr(module, "base_layer", None)) for name, module in model.named_modules())
    return [name for name, layer in layers if isinstance(layer, LINEAR)]


def cut_adapter(
    layer: Any, side: Side, group: Group, *, is_gathered: bool
) -> tuple[Any, list[nn.Parameter]]:
    """Tag the adapter of `layer`, whose base weight was sharded by `side`; no weights move.
    is_gathered: whether the layer gathers its outputs. Returns the sharded matrix, whose forward
    must be wrapped like the base layer's, and all sharded parameters."""
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    base = shard_of(layer.base_layer.weight)
    assert base is not None
    assert base.dim == int((side == "inputs") != isinstance(layer.base_layer, Conv1D))
    sharded, replicated, dim = (up, down, 0) if side == "outputs" else (down, up, 1)
    _tag_replicated(replicated.weight, group)
    _tag_sharded(sharded.weight, base, dim)
    parameters = [sharded.weight]
    if ADAPTER in layer.lora_magnitude_vector:
        dora = layer.lora_magnitude_vector[ADAPTER]
        if side == "outputs" and not is_gathered:
            _tag_sharded(dora.weight, base, 0)
            parameters.append(dora.weight)
        else:
            _tag_replicated(dora.weight, group)
        _measure_full_rows(dora, side, group, base if is_gathered else None)
    return sharded, parameters


def _tag_replicated(parameter: nn.Parameter, group: Group) -> None:
    tag_shard(parameter, Shard(tuple(parameter.shape), primary=dist.get_rank(group) == 0))


def _tag_sharded(parameter: nn.Parameter, base: Shard, dim: int) -> None:
    tag_shard(parameter, replace(base, shape=tuple(parameter.shape), dim=dim))


def _measure_full_rows(dora: Any, side: Side, group: Group, gathered: Shard | None) -> None:
    """Make a layer of DoRA divide by the lengths of full rows of weights, where this rank has a
    part of every row, or a part of the rows, and all ranks' outputs are gathered (`gathered`).

    peft takes no gradient of the lengths. With dropout it multiplies by the layer's weight,
    instead of calling the layer, which exchanges partial results.
    """
    forward, own_norm = dora.forward, dora.get_weight_norm

    def run(x: torch.Tensor, *, base_layer: Any, base_result: Any = None, **options: Any) -> Any:
        result = base_layer(x) if base_result is None else base_result
        return forward(x, base_layer=base_layer, base_result=result, **options)

    def product(lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> torch.Tensor:
        """Compute this rank's part; peft calls both with an identity matrix, which would
        exchange."""
        low_rank: torch.Tensor = lora_B.weight @ lora_A.weight
        return low_rank

    def norm(weight: Any, lora_weight: Any, scaling: float, adapter_name: str | None = None) -> Any:
        if gathered is not None:
            assert gathered.dim is not None
            local_norm = own_norm(weight, lora_weight, scaling, adapter_name=adapter_name)
            return gather_last(local_norm.detach(), gathered.shape[gathered.dim], group)
        rows = (weight.T if dora.fan_in_fan_out else weight) + scaling * lora_weight
        lengths = torch.linalg.vector_norm(rows.detach(), dim=1, dtype=torch.float32)
        return summed(lengths.square(), group).sqrt().to(weight.dtype)

    shadow(dora, "forward", run)
    shadow(dora, "get_lora_weight", product)
    if side == "inputs" or gathered is not None:
        shadow(dora, "get_weight_norm", norm)


def cut_stacked_adapters(model: nn.Module, group: Group) -> None:
    """Tag the adapters of tagged stacked weights [experts, ...]; no weights move. Raises ModelError
    for a stack that is divided into full experts."""
    for name, (_, layer) in parameter_layers(model).items():
        base = shard_of(layer.get_param())
        if base is None or base.dim is None:
            continue
        if base.dim == 0:
            raise ModelError(
                f"adapters.target_parameters: {name}: adapters are not supported on a stack of "
                "which ranks have full experts -> remove it, or parallel.tensor=1"
            )
        # The order in which peft reads a stack's dimensions.
        is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
        cuts_outputs = (base.dim == 1) != is_transposed
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        sharded, replicated, dim = (up, down, 0) if cuts_outputs else (down, up, 1)
        _tag_sharded(sharded, base, dim)
        _tag_replicated(replicated, group)
        replicated.register_hook(lambda gradient: summed(gradient, group))


def draw_whole_masks(layer: Any) -> None:
    """Make the adapter's dropout of `layer`, which gets this rank's part of the inputs, draw a mask
    for all inputs: as one process draws it, and as many random numbers on every rank."""
    dropout = layer.lora_dropout[ADAPTER]
    shard = shard_of(layer.lora_A[ADAPTER].weight)
    assert shard is not None
    if not isinstance(dropout, nn.Dropout):
        return

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not dropout.training:
            return x
        factors = F.dropout(x.new_ones(*x.shape[:-1], shard.shape[-1]), dropout.p)
        return x * torch.cat([factors[..., start:stop] for start, stop in shard.ranges], -1)

    shadow(dropout, "forward", forward)
