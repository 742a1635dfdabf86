"""Adapters on layers that tensor parallelism cuts, by peft's rule.

On a column-parallel layer ``lora_A`` is replicated and ``lora_B`` is cut as the layer is; on a
row-parallel one ``lora_A`` is cut as the layer is and ``lora_B`` is replicated. The matrix that is
cut is called as a layer of the same style: ranks exchange the low-rank tensor between the two, and
the gradients of the replicated matrix are complete on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from bigtrain.models.layers.adapters import ADAPTER
from bigtrain.models.parallel.sharding import Shard, shard_of, tag_shard
from bigtrain.models.torch_patches import shadow

Side = Literal["outputs", "inputs"]


def adapted_names(model: nn.Module) -> list[str]:
    """Names of the layers of `model` that have adapters."""
    end = ".base_layer"
    return [n.removesuffix(end) for n, _ in model.named_modules() if n.endswith(end)]


def cut_adapter(layer: Any, side: Side, is_first: bool) -> Any:
    """Tag the adapter of `layer`, whose own weight was cut by `side`; no weights move.

    is_first: whether this is the first rank of the group. Returns the matrix that is cut, whose
    forward must be wrapped as that of the layer's own weight.
    """
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    base = shard_of(layer.base_layer.weight)
    assert base is not None
    assert base.dim == _dimension(layer.base_layer, side)
    cut, whole, dim = (up, down, 0) if side == "outputs" else (down, up, 1)
    tag_shard(whole.weight, Shard(tuple(whole.weight.shape), primary=is_first))
    tag_shard(cut.weight, replace(base, shape=tuple(cut.weight.shape), dim=dim))
    return cut


def _dimension(layer: nn.Module, side: Side) -> int:
    return int((side == "inputs") != isinstance(layer, Conv1D))


def draw_whole_masks(layer: Any) -> None:
    """Make the adapter's dropout of `layer`, which gets this rank's part of the inputs, draw a mask
    for all of them: as one process draws it, and as many random numbers on every rank.
    """
    dropout = layer.lora_dropout[ADAPTER]
    shard = shard_of(layer.lora_A[ADAPTER].weight)
    assert shard is not None
    if isinstance(dropout, nn.Dropout):
        shadow(dropout, "forward", _part_of_mask(dropout, shard))


def _part_of_mask(dropout: nn.Dropout, shard: Shard) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if not dropout.training:
            return x
        factors = F.dropout(x.new_ones(*x.shape[:-1], shard.shape[-1]), dropout.p)
        return x * torch.cat([factors[..., start:stop] for start, stop in shard.ranges], -1)

    return forward
