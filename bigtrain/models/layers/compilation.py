"""torch.compile of single decoder layers, and offloading of activation checkpoints to host memory.

The layers share code and shapes, so the first one compiles and the others reuse its graphs
(regional compilation in PyTorch's documentation); the full model would take minutes, and break the
graph at every hook. A layer's forward method is replaced, so that names stay and its hooks are
outside of the graph, while recomputation is inside.

Offloading: torch's `save_on_cpu` copies a checkpointed layer's input to pinned memory and back on
the compute stream, so a step gets slower by the time of these copies. (DeepSpeed 0.19.8's
`CheckpointHiddenStatesOffload` finds tensors by identity, and ZeRO-3's hooks pass other ones.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bigtrain.errors import ModelError
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.torch_patches import shadow
from bigtrain.models.transformers_patches import Checkpoint, replace_checkpoint


def is_compiled(
    wanted: Literal["auto", "on", "off"], device: Literal["cpu", "cuda"], *, allowed: bool
) -> bool:
    """Return whether layers are compiled: ``auto`` does on CUDA, where it is `allowed`."""
    return wanted == "on" or (wanted == "auto" and device == "cuda" and allowed)


def compile_layers(model: PreTrainedModel) -> int:
    """Make the decoder layers of `model` compile at their first call; returns their number. Raises
    ModelError for a model without any."""
    layers: list[Any] = [
        layer for _, layer in decoder_layers(model) if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"model.compile: a {model.config.model_type} has no decoder layers of transformers' "
            "kind -> model.compile=off"
        )
    for layer in layers:
        # Shapes are those of the micro-batch: the same in every step.
        shadow(layer, "forward", torch.compile(layer.forward, dynamic=False))
    return len(layers)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled layers run eagerly: for a pass with shapes that occur once."""
    with torch.compiler.set_stance("force_eager"):
        yield


def offload_checkpoints(model: PreTrainedModel, device_type: str) -> int:
    """Let the checkpointed layers of `model` save their inputs on the host; returns their number.
    Gradient checkpointing must be on. Raises ModelError for a model without such layers."""
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]
    if not layers:
        raise ModelError(
            f"model.activation_offload: a {model.config.model_type} has no checkpointed layers of "
            "transformers' kind -> model.activation_offload=false"
        )
    for layer in layers:
        replace_checkpoint(layer, partial(_saving_on_cpu, device_type))
    return len(layers)


def _saving_on_cpu(device_type: str, checkpoint: Checkpoint) -> Checkpoint:
    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # What is saved inside `function` has hooks of the checkpoint's own, which come first.
        with save_on_cpu(pin_memory=device_type != "cpu", device_type=device_type):
            return checkpoint(function, *args, **kwargs)

    return run
