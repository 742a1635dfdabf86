"""Layers and stacked weights that get LoRA adapters, are trained as copies, or are quantized.

The presets `attention` and `mlp` depend on what modules are, not on their names. Attention is the
module that transformers records attention weights of; where an architecture declares none, a module
of a decoder layer that has heads (`head_dim`) and no convolution. All other linear layers of a
decoder layer are its MLP, except for routers and for modules that mix tokens in another way (with a
convolution, like Mamba's).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from bigtrain.models.layers.parameter_roles import Role, is_within, parameter_roles
from bigtrain.models.layers.parameters import (
    decoder_layers,
    local_shape,
    output_layer,
    parameter_of,
)
from bigtrain.models.transformers_patches import attention_classes, kept_in_float32
from bigtrain.settings.sections.adapters import AdaptersSection, Preset

LINEAR = (nn.Linear, Conv1D)
"""Classes of layers that peft gives adapters to; see `is_product`."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


class Matches(NamedTuple):
    """Names that patterns select, in the model's order, and patterns that match none."""

    names: list[str]
    missing: list[str]


def find_targets(model: PreTrainedModel, section: AdaptersSection) -> Matches:
    """Return the names of the layers that get adapters. Only linear layers, and never the head,
    whatever the patterns match."""
    head = output_layer(model)
    linear = [
        name for name, module in model.named_modules() if is_product(module) and module is not head
    ]
    if section.targets == "all-linear":
        return Matches(linear, [])
    preset_layers: set[str] = set()
    empty: list[str] = []
    for preset in section.presets:
        layers = layers_of(model, preset)
        preset_layers.update(layers)
        if not layers and not (preset == "mlp" and stacked_weights(model)):
            empty.append(preset)
    matches = _select(linear, section.patterns, preset_layers)
    return Matches(matches.names, matches.missing + empty)


def find_parameters(model: PreTrainedModel, section: AdaptersSection) -> Matches:
    """Return the names of the stacked weights that get adapters."""
    # The stacked weights of experts belong to the preset `mlp`.
    preset_stacks = set(stacked_weights(model)) if "mlp" in section.presets else set()
    return _select(stacked_weights(model), section.target_parameters, preset_stacks)


def find_saved(model: PreTrainedModel, section: AdaptersSection) -> Matches:
    """Return the names of the modules in ``modules_to_save``."""
    names = [name for name, m in model.named_modules() if any(True for _ in m.parameters(False))]
    return _select(names, section.modules_to_save)


def _select(
    names: Sequence[str], patterns: Sequence[str], selected: Container[str] = ()
) -> Matches:
    """Return `names` that are `selected` or match a pattern, and the patterns that match none."""

    def matches(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)

    return Matches(
        [n for n in names if n in selected or any(matches(n, p) for p in patterns)],
        [p for p in patterns if not any(matches(name, p) for name in names)],
    )


def quantized_layers(model: PreTrainedModel) -> list[str]:
    """Return names of the layers whose weights ``adapters.quantization`` keeps in 4 bits, in the
    model's order: the layers that transformers chooses (all linear layers but the head and what it
    keeps in float32). `model` may be on the meta device, and is not quantized."""
    unconverted = [*get_keys_to_not_convert(model), *kept_in_float32(model)]
    return [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, unconverted)
    ]


def is_product(module: nn.Module) -> bool:
    """Return whether `module` is a linear layer to which a product of two matrices can be added.
    Some subclasses with another forward method are not: routers that return their choice
    (Llama 4's), products of groups (DeepSeek-V4's). A subclass of transformers is
    tried on the meta device."""
    if not isinstance(module, LINEAR):
        return False
    if type(module) in LINEAR or not type(module).__module__.startswith("transformers."):
        return True
    parameters = module.named_parameters(recurse=False)
    weights = {name: torch.empty(local_shape(p), device="meta") for name, p in parameters}
    inputs = torch.empty(3, module.in_features, device="meta")
    try:
        outputs = functional_call(module, weights, (inputs,))
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False
    return isinstance(outputs, torch.Tensor) and outputs.shape == (3, module.out_features)


def layers_of(model: PreTrainedModel, preset: Preset) -> list[str]:
    """Return names of the linear layers of a preset, in the model's order; none if the model has no
    attention that can be distinguished from its other layers."""
    classes = attention_classes(model)
    roles = parameter_roles(model).values()
    routers = {entry.module for entry in roles if entry.role is Role.ROUTER}
    presets: dict[str, Preset] = {}
    for layer_name, layer in decoder_layers(model):
        modules = [(name, module) for name, module in layer.named_modules() if name]
        # Modules with a convolution mix tokens, and are not MLPs.
        mixers = {
            child: name
            for name, child in layer.named_children()
            if any(isinstance(submodule, _CONVOLUTIONS) for submodule in child.modules())
        }
        # Attention: transformers' classes, or without any, children with heads and no convolution.
        children = set(layer.children())
        attention = {
            name
            for name, module in modules
            if (
                isinstance(module, classes)
                if classes
                else module in children and hasattr(module, "head_dim") and module not in mixers
            )
        }
        for name, module in modules:
            if not is_product(module):
                continue
            if is_within(name, attention):
                presets[f"{layer_name}.{name}"] = "attention"
            elif not is_within(name, mixers.values()) and f"{layer_name}.{name}" not in routers:
                presets[f"{layer_name}.{name}"] = "mlp"
    if not classes and "attention" not in presets.values():
        return []
    return [name for name, layer_preset in presets.items() if layer_preset == preset]


def stacked_weights(model: nn.Module) -> list[str]:
    """Return names of the weights of experts that are stacked, [experts, ...], in the model's
    order."""
    return [
        name
        for name, entry in parameter_roles(model).items()
        if entry.role is Role.EXPERTS and len(local_shape(parameter_of(model, name))) == 3
    ]
