"""The role of every parameter of a model: the table that decides what is done with parameters.

A role follows from the type of the module that holds a parameter, from what transformers declares
(`_can_record_outputs` names the routers) and, for parameters that a module holds directly, from
the name in the module: never from a number of dimensions or from equal widths.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from bigtrain.models.layers.parameters import local_shape, output_layer, parameter_of
from bigtrain.models.transformers_patches import modules_of_experts, recorded_classes


class Role(StrEnum):
    """Role of a parameter in its model."""

    EMBEDDING = "embedding"
    POSITION = "position"
    HEAD = "head"
    MATRIX = "hidden matrix"
    EXPERTS = "stack of experts"
    ROUTER = "router"
    CONVOLUTION = "convolution"
    NORM = "norm"
    BIAS = "bias"
    STATE = "recurrent state"
    ADAPTER = "adapter"
    OTHER = "other"

    def decays(self, *, decay_embeddings: bool = True) -> bool:
        """Return whether weight decay applies: to weights that are multiplied by activations, and
        to tables of embeddings if `decay_embeddings`."""
        return self in _PRODUCTS or (decay_embeddings and self in _TABLES)


_PRODUCTS = {Role.HEAD, Role.MATRIX, Role.EXPERTS, Role.ROUTER, Role.CONVOLUTION, Role.ADAPTER}
_TABLES = {Role.EMBEDDING, Role.POSITION}

LINEAR = (nn.Linear, Conv1D, nn.Bilinear)
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_EPSILON = ("eps", "epsilon", "variance_epsilon", "norm_eps", "layer_norm_eps")
"""Attributes of a normalization, whatever its class is called."""

_GROUPS = ("n_groups", "num_groups", "groups")
"""Attributes of a linear layer that is called with groups of inputs."""

# Names that modules give to the parameters that they hold.
_BIAS = re.compile(r"(^|_)bias(_[a-z]|\d)?$")
_STATE = re.compile(r"^(A_log|D|time_\w+|recurrent_param)$")
_POSITION = re.compile(r"(^|_)(pos|position|positions|positional|wpe)(_|$)")
_WEIGHT = re.compile(r"((^|_)(weight|proj|kernel|fn)|^[qkvor]|^[wv]\d)$")
_ADAPTER, _MAGNITUDE = "lora_", "lora_magnitude_vector"
_ROUTER = re.compile(r"(Router|Gating|TopKGate|Top2Gate)$")
_ROUTER_LOGITS = "router_logits"


@dataclass(frozen=True)
class ParameterRole:
    """The role of a parameter.

    name: the first name, since tied parameters have several. module: the name of the module that
    holds the parameter, leaf: its name in the module. is_stacked: whether it contains weights or
    biases of many experts, and a token uses only the experts that it is routed to. num_groups:
    matrices in the weight, stacked in rows, of a linear layer that multiplies groups of inputs with
    different matrices.
    """

    name: str
    role: Role
    module: str
    leaf: str
    is_stacked: bool = False
    num_groups: int = 1


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of every parameter of `model` by its first name, in the model's order. The
    model may be on the meta device, partitioned, sharded, a pipeline stage, and have adapters. Not
    collective. A parameter that is an embedding and a head is an embedding."""
    classifier = _Classifier(model)
    roles: dict[str, ParameterRole] = {}
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        module_parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for leaf, parameter in module_parameters:
            role = classifier.role(prefix, module, leaf, parameter)
            name = f"{prefix}.{leaf}" if prefix else leaf
            first = first_names.setdefault(id(parameter), name)
            previous = roles.get(first)
            if previous is None or (role in _TABLES and previous.role not in _TABLES):
                # A layer that divides its inputs into groups has several matrices in its weight.
                num_groups = 1
                if isinstance(module, nn.Linear) and type(module) not in LINEAR:
                    counts = (getattr(module, key, None) for key in _GROUPS)
                    num_groups = next((n for n in counts if isinstance(n, int) and n > 0), 1)
                is_stacked = classifier.holds_stacks(prefix, module)
                roles[first] = ParameterRole(first, role, prefix, leaf, is_stacked, num_groups)
    return roles


def routers(model: nn.Module) -> list[str]:
    """Return names of the modules that choose experts for tokens: of the classes whose outputs
    transformers records as router logits, of classes that are called routers, and linear layers
    that a block of experts calls its router."""
    return _Classifier(model).routers


class _Classifier:
    """Facts about a model's modules that roles depend on."""

    def __init__(self, model: Any) -> None:
        marked = set(modules_of_experts(model))
        modules = dict(model.named_modules())
        self.experts = [
            name
            for name, module in modules.items()
            if module in marked or type(module).__name__.endswith("Experts")
        ]
        declared = recorded_classes(model, _ROUTER_LOGITS)
        # Some declared classes are a block of experts that returns router logits, not the router.
        blocks = {name for name, m in modules.items() if isinstance(m, declared)}
        blocks |= {name.rpartition(".")[0] for name in self.experts}
        named = [
            name
            for name, module in modules.items()
            if isinstance(module, LINEAR)
            and "router" in name.rpartition(".")[2]
            and name.rpartition(".")[0] in blocks
        ]
        self.routers = named + [
            name
            for name, module in modules.items()
            if (isinstance(module, declared) or _ROUTER.search(type(module).__name__))
            and not any(child.startswith(f"{name}.") for child in [*self.experts, *named])
        ]
        self._head = output_layer(model)

    def holds_stacks(self, prefix: str, module: nn.Module) -> bool:
        """Return whether the parameters of `module` contain the weights of many experts."""
        return not isinstance(module, LINEAR) and is_within(prefix, self.experts)

    def role(self, prefix: str, module: nn.Module, leaf: str, parameter: nn.Parameter) -> Role:
        """Return the role of `parameter`, which `module` holds as `leaf`."""
        attribute, class_name = prefix.rpartition(".")[2], type(module).__name__
        at_most_one_axis = sum(length > 1 for length in local_shape(parameter)) < 2
        # Adapters, then parameters that names and classes identify.
        if f".{_ADAPTER}" in f".{prefix}.{leaf}":
            if _MAGNITUDE in f"{prefix}.{leaf}":
                return Role.OTHER
            return Role.ROUTER if is_within(prefix, self.routers) else Role.ADAPTER
        if _BIAS.search(leaf) or _BIAS.search(attribute):
            return Role.BIAS
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if "bias" in attribute:
                return Role.BIAS
            is_position = any(_POSITION.search(name) for name in prefix.split(".")[-2:])
            return Role.POSITION if is_position or "Position" in class_name else Role.EMBEDDING
        # Modules that normalize and scale their inputs: by their class, or by an epsilon.
        is_bare = next(module.children(), None) is None and leaf in ("weight", "scale")
        has_epsilon = is_bare and any(hasattr(module, name) for name in _EPSILON)
        if not isinstance(module, LINEAR) and ("norm" in class_name.lower() or has_epsilon):
            return Role.NORM
        is_weight = isinstance(module, (*LINEAR, nn.MultiheadAttention)) or bool(
            _WEIGHT.search(leaf) and not at_most_one_axis
        )
        # Weights of products: the head, then by the module that the layer is a part of.
        if module is self._head and is_weight:
            return Role.HEAD
        if is_within(prefix, self.routers):
            return Role.ROUTER if is_weight else Role.OTHER
        if self.holds_stacks(prefix, module):
            return Role.OTHER if at_most_one_axis else Role.EXPERTS
        if isinstance(module, LINEAR):
            return Role.MATRIX
        # Parameters that a module of another class computes with.
        if isinstance(module, _CONVOLUTIONS) or (is_weight and "conv" in class_name.lower()):
            return Role.CONVOLUTION
        if _STATE.search(leaf):
            return Role.STATE
        if "Position" in class_name or _POSITION.search(leaf):
            return Role.POSITION
        return Role.MATRIX if is_weight else Role.OTHER


def is_within(name: str, parents: Iterable[str]) -> bool:
    """Return whether module `name` is one of `parents` or a submodule of one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


@dataclass(frozen=True)
class ParameterGroups:
    """Parameters with and without weight decay, in the model's order."""

    decay: list[nn.Parameter]
    no_decay: list[nn.Parameter]


def split_by_decay(
    model: nn.Module, *, decay_embeddings: bool, untrained: Collection[str] = ()
) -> ParameterGroups:
    """Return trained parameters by `Role.decays`; adapters of the weights `untrained` never decay.
    Frozen parameters are in neither group."""
    groups = ParameterGroups([], [])
    for name, entry in parameter_roles(model).items():
        parameter = parameter_of(model, name)
        if not parameter.requires_grad:
            continue
        decays = entry.role.decays(decay_embeddings=decay_embeddings)
        if untrained and adapted_weight(name) in untrained:
            decays = False
        (groups.decay if decays else groups.no_decay).append(parameter)
    return groups


def adapted_weight(name: str) -> str:
    """Return the weight of the model without adapters that an adapter's parameter `name` is added
    to; `name` for any other parameter."""
    head, marker, _ = f".{name}".partition(f".{_ADAPTER}")
    return f"{head[1:]}.weight" if marker else name


def collapsed(names: Iterable[str]) -> list[str]:
    """Return `names` with indices of layers and experts replaced by ``*``, sorted, without
    duplicates."""
    return sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})
