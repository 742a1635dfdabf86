"""Initial values of adapters that are a function of the base weights (DoRA's magnitudes)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from bigtrain.models.layers.adapters import MAGNITUDE
from bigtrain.models.weights.import_hf import Weights
from bigtrain.models.weights.lazy_tensors import LazyTensor, Offsets
from bigtrain.models.weights.quantized import dequantized, is_quantized


def with_magnitudes(weights: Weights, model: nn.Module) -> Weights:
    """`weights` with the initial values of DoRA's magnitudes in `model`: the 2-norm of the weights
    of each output, float32 [outputs]. Nothing is read here; those of layers in 4 bits are of what
    these hold when they are read."""
    tensors: dict[str, LazyTensor] = dict(weights.tensors)
    for name, _ in model.named_parameters():
        if name.endswith(MAGNITUDE):
            layer_name = name.removesuffix(MAGNITUDE)
            layer: Any = model.get_submodule(layer_name)
            own = layer.base_layer
            if is_quantized(own):
                tensors[name] = LazyTensor(
                    (own.out_features,), torch.float32, _DequantizedView(own)
                )
                continue
            base = weights.tensors[f"{layer_name}.weight"]
            tensors[name] = magnitude(base, transposed=bool(layer.fan_in_fan_out))
    return replace(weights, tensors=tensors)


@dataclass(frozen=True)
class _DequantizedView:
    """The magnitudes of a layer in 4 bits: not those of the weights in the files."""

    layer: Any

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        found = magnitude(dequantized(self.layer), transposed=False)
        out.copy_(found[offsets[0] : offsets[0] + out.shape[0]])

    def sources(self) -> Iterator[object]:
        return iter(())


def magnitude(weight: Any, *, transposed: bool) -> Any:
    """Return the 2-norm of the weights of each output of a layer, as peft takes it; lazy as
    `weight` is.

    transposed: whether outputs are columns (Conv1D).
    """
    dim = 0 if transposed else 1
    return torch.linalg.vector_norm(weight.to(torch.float32), dim=dim)
