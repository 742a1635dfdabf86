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
