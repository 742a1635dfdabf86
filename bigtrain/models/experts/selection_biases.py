"""The biases added to router scores when tokens choose experts, for architectures with them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from bigtrain.models.layers.parameters import local_shape
from bigtrain.models.torch_patches import own_parameter
from bigtrain.models.transformers_patches import modules_of_experts


@dataclass(frozen=True)
class SelectionBias:
    """The bias of one module of experts that tokens choose from.

    experts: the module's name. name: of the bias, a buffer, or a parameter if `is_parameter`.
    tensor: an element for each expert, in any shape; ZeRO-3 may have partitioned a parameter's.
    """

    experts: str
    name: str
    tensor: torch.Tensor
    is_parameter: bool


def selection_biases(model: nn.Module, untrained: Collection[str] = ()) -> list[SelectionBias]:
    """By module of experts, in model order.

    Architectures call it otherwise (``e_score_correction_bias``, ``expert_bias``), and have it as a
    buffer or as a parameter. It is a bias of the block that holds the experts, or of its router,
    with an element for each expert and without a gradient: a choice has none. `untrained`: names of
    the parameters without one.
    """
    modules = dict(model.named_modules())
    found = []
    for experts in list(modules_of_experts(model)):
        name = next(key for key, module in modules.items() if module is experts)
        block = name.rpartition(".")[0]
        inside = {
            key: module
            for key, module in modules.items()
            if f"{key}.".startswith(f"{block}.") and not f"{key}.".startswith(f"{name}.")
        }
        biases = [
            bias
            for key, module in inside.items()
            for bias in _biases(name, key, module, untrained)
            if _count(bias.tensor) == int(experts.num_experts)  # type: ignore[arg-type]
        ]
        if len(biases) == 1:
            found += biases
    return found


def _biases(
    experts: str, prefix: str, module: nn.Module, untrained: Collection[str]
) -> list[SelectionBias]:
    found = [
        SelectionBias(experts, f"{prefix}.{leaf}", buffer, False)
        for leaf, buffer in module.named_buffers(recurse=False)
        if "bias" in leaf and buffer.is_floating_point()
    ]
    return found + [
        SelectionBias(experts, f"{prefix}.{leaf}", own_parameter(module, leaf), True)
        for leaf, _ in module.named_parameters(recurse=False)
        if "bias" in leaf and f"{prefix}.{leaf}" in untrained
    ]


def _count(tensor: torch.Tensor) -> int:
    return math.prod(local_shape(tensor))
