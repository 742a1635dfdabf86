"""Quantized weights of a model: which layers and parameters are, and the packed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_quantized(module: object) -> bool:
    """Return whether `module` is a layer of `quantize_layers`."""
    return hasattr(module, "quantized_from")


def is_packed(parameter: object) -> bool:
    """Return whether `parameter` is the packed weight of a quantized layer: one byte for one or two
    weights, not to be read, written or saved as a weight."""
    return hasattr(parameter, "bnb_quantized")


def packed_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield all packed weights, with their scales and the values of codes."""
    for module in filter(is_quantized, model.modules()):
        layer: Any = module
        weight = layer.weight
        yield weight.data
        if not hasattr(weight, "quant_state"):  # LLM.int8
            if layer.state.SCB is not None:
                yield layer.state.SCB
            continue
        for state in (weight.quant_state, getattr(weight.quant_state, "state2", None)):
            if state is not None:
                parts = (state.absmax, state.code, state.offset)
                yield from (tensor for tensor in parts if tensor is not None)
