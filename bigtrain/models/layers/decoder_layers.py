"""A model's decoder layers, the members of its outermost module lists, and experts in them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from bigtrain.models.layers.parameters import local_shape
from bigtrain.models.transformers_patches import modules_of_experts


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By name, in model order; those of other pipeline stages are placeholders."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(i) for i in inside):
            inside.append(f"{name}.")
            yield from ((f"{name}.{index}", layer) for index, layer in module.named_children())


def listed_layers(model: nn.Module, count: int | None) -> list[tuple[str, nn.Module]]:
    """`decoder_layers` of the first list that has `count` of them, or all where none has."""
    layers = list(decoder_layers(model))
    lists: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in layers:
        lists.setdefault(name.rpartition(".")[0], []).append((name, module))
    return next((found for found in lists.values() if len(found) == count), layers)


def expert_stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that hold the weights of experts as stacks [experts, ...].

    Those of which transformers computes the products, and others whose class it calls so (Llama
    4's and LongCat's).
    """
    yield from modules_of_experts(model)
    for module in unmarked_experts(model):
        if any(len(local_shape(parameter)) == 3 for parameter in module.parameters(recurse=False)):
            yield module


def unmarked_experts(model: nn.Module) -> list[nn.Module]:
    """Modules whose class is called experts, and of which transformers does not compute the
    products."""
    marked = set(modules_of_experts(model))
    called_so = (m for m in model.modules() if type(m).__name__.endswith("Experts"))
    return [module for module in called_so if module not in marked]
