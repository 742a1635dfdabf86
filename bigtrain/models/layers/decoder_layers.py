"""A model's decoder layers: the members of its outermost module lists."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


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
