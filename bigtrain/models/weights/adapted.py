"""Initial values of adapters that are a function of the base weights (DoRA's magnitudes)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bigtrain.models.layers.adapters import MAGNITUDE
from bigtrain.models.weights.import_hf import Weights
from bigtrain.models.weights.lazy_tensors import LazyTensor


def with_magnitudes(weights: Weights, model: nn.Module) -> Weights:
    """`weights` with the initial values of DoRA's magnitudes in `model`: the 2-norm of the weights
    of each output, float32 [outputs]. Nothing is read here."""
    tensors: dict[str, LazyTensor] = dict(weights.tensors)
    for name, _ in model.named_parameters():
        if name.endswith(MAGNITUDE):
            layer_name = name.removesuffix(MAGNITUDE)
            layer: Any = model.get_submodule(layer_name)
            base = weights.tensors[f"{layer_name}.weight"]
            tensors[name] = magnitude(base, transposed=bool(layer.fan_in_fan_out))
    return replace(weights, tensors=tensors)


def magnitude(weight: Any, *, transposed: bool) -> Any:
    """The 2-norm of the weights of each output of a layer, as peft takes it; lazy as `weight` is.

    transposed: whether outputs are columns (Conv1D).
    """
    dim = 0 if transposed else 1
    return torch.linalg.vector_norm(weight.to(torch.float32), dim=dim)
