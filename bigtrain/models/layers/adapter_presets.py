"""Layers of a kind, `attention` and `mlp`, by what modules are and not by their names.

Attention is the module that transformers records attention weights of; where an architecture
declares none, a module of a decoder layer that has heads (`head_dim`) and no convolution. What is
left of a decoder layer is its MLP, but for modules that mix tokens in another way (those with a
convolution, as Mamba's) and routers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bigtrain.models.layers.decoder_layers import decoder_layers
from bigtrain.models.layers.parameter_roles import Role, parameter_roles
from bigtrain.models.layers.parameters import local_shape, parameter_of
from bigtrain.models.transformers_patches import attention_classes
from bigtrain.settings.sections.adapters import Preset

LINEAR = (nn.Linear, Conv1D)
"""Kinds of layers that peft gives adapters to; see `is_product`."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


def is_product(module: nn.Module) -> bool:
    """Whether `module` is a linear layer to which a product of two matrices can be added.

    Of subclasses with a forward pass of their own some are not: routers that return their choice
    (Llama 4's), products of groups (DeepSeek-V4's). One is called without data.
    """
    if not isinstance(module, LINEAR):
        return False
    if type(module) in LINEAR or not type(module).__module__.startswith("transformers."):
        return True
    own = module.named_parameters(recurse=False)
    weights = {name: torch.empty(local_shape(p), device="meta") for name, p in own}
    inputs = torch.empty(3, module.in_features, device="meta")
    try:
        outputs = functional_call(module, weights, (inputs,))
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(outputs, torch.Tensor) and outputs.shape == (3, module.out_features)


def layers_of(model: PreTrainedModel, preset: Preset) -> list[str]:
    """Names of the linear layers of a kind, in the model's order; none if the model has no
    attention that can be told from the rest."""
    return [name for name, kind in _kinds(model).items() if kind == preset]


def stacks_of(model: PreTrainedModel, preset: Preset) -> list[str]:
    """Names of the stacked weights of experts of a kind: all are of `mlp`."""
    if preset != "mlp":
        return []
    return stacked_weights(model)


def stacked_weights(model: nn.Module) -> list[str]:
    """Names of the weights of experts that are stacked, [experts, ...], in the model's order."""
    return [
        name
        for name, entry in parameter_roles(model).items()
        if entry.role is Role.EXPERTS and len(local_shape(parameter_of(model, name))) == 3
    ]


def _kinds(model: PreTrainedModel) -> dict[str, Preset]:
    """The kind of each linear layer of a decoder layer that is of one."""
    classes = attention_classes(model)
    found: dict[str, Preset] = {}
    routed = {e.module for e in parameter_roles(model).values() if e.role is Role.ROUTER}
    for layer_name, layer in decoder_layers(model):
        attention = {
            name for name, module in _modules(layer) if _is_attention(module, classes, layer)
        }
        mixers = {name for name, module in layer.named_children() if _has(module, _CONVOLUTIONS)}
        for name, module in _modules(layer):
            if not is_product(module):
                continue
            if _is_in(name, attention):
                found[f"{layer_name}.{name}"] = "attention"
            elif not _is_in(name, mixers) and f"{layer_name}.{name}" not in routed:
                found[f"{layer_name}.{name}"] = "mlp"
    return found if classes or "attention" in found.values() else {}


def _modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in layer.named_modules() if name)


def _is_attention(module: nn.Module, classes: tuple[type, ...], layer: nn.Module) -> bool:
    if classes:
        return isinstance(module, classes)
    is_child = any(module is child for child in layer.children())
    return is_child and hasattr(module, "head_dim") and not _has(module, _CONVOLUTIONS)


def _has(module: nn.Module, kinds: tuple[type, ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in module.modules())


def _is_in(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)
