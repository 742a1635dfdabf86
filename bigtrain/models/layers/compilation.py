"""torch.compile of single decoder layers.

The layers share code and shapes, so the first layer compiles and all later layers reuse its graphs
(regional compilation in PyTorch's documentation); the full model would take minutes, and break the
graph at every hook. A layer's forward method is replaced, so that names stay and hooks are outside
of the graph, while recomputation is inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bigtrain.errors import ModelError
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.torch_patches import shadow

_COMPILED = "bigtrain_compiled"


def is_compiled(
    setting: Literal["auto", "on", "off"], device: Literal["cpu", "cuda"], *, allowed: bool
) -> bool:
    """Return whether layers are compiled: ``auto`` does on CUDA, where it is `allowed`."""
    return setting == "on" or (setting == "auto" and device == "cuda" and allowed)


def compile_layers(model: PreTrainedModel) -> int:
    """Make the decoder layers of `model` compile at their first call; returns their number. Raises
    ModelError for a model without decoder layers."""
    layers: list[Any] = [
        layer for _, layer in decoder_layers(model) if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"model.compile: a {model.config.model_type} has no decoder layers of transformers' "
            "kind -> model.compile=off"
        )
    for layer in layers:
        # Shapes depend on the micro-batch only: the same in every step.
        shadow(layer, "forward", torch.compile(layer.forward, dynamic=False))
        shadow(layer, _COMPILED, True)
    return len(layers)


def compiled_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `model` whose forward method is compiled."""
    return [module for module in model.modules() if _COMPILED in vars(module)]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled layers run eagerly: for a pass with shapes that occur once."""
    with torch.compiler.set_stance("force_eager"):
        yield
