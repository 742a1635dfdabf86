"""4-bit weights of a model: tests for quantized layers and parameters, and the packed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_quantized(module: object) -> bool:
    """Return whether `module` is a layer of `quantize_layers`."""
    return hasattr(module, "quantized_from")


def is_packed(parameter: object) -> bool:
    """Return whether `parameter` is the packed weight of a quantized layer: one byte for two
    weights, not to be read, written or saved as a weight."""
    return hasattr(parameter, "bnb_quantized")


def packed_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all packed weights, with their scales and the values of codes."""
    for layer in filter(is_quantized, model.modules()):
        weight: Any = layer.weight
        yield weight.data
        for state in (weight.quant_state, getattr(weight.quant_state, "state2", None)):
            if state is not None:
                parts = (state.absmax, state.code, state.offset)
                yield from (tensor for tensor in parts if tensor is not None)
