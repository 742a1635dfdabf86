"""Offloading activation checkpoints to host memory, for sequences whose activations do not fit.

A checkpointed layer saves only its input: layers x tokens x hidden size elements in all, most of
the activation memory with long sequences. torch's `save_on_cpu` copies them to pinned memory in the
forward pass and back in the backward pass, on the compute stream, so every step gets slower by the
time of these copies. (DeepSpeed 0.19.8 has `CheckpointHiddenStatesOffload` with a stream of its
own; it finds tensors by identity, and ZeRO-3's hooks pass other ones to layers: nothing is moved.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bigtrain.errors import ModelError
from bigtrain.models.transformers_patches import Checkpoint, replace_checkpoint


def offload_checkpoints(model: PreTrainedModel, device_type: str) -> int:
    """Let the checkpointed layers of `model` save their inputs on the host; returns their number.

    Gradient checkpointing must be on. Raises ModelError for a model without such layers.
    """
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
