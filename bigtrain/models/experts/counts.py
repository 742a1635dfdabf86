"""Counting on the device how many tokens choose each expert during training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from bigtrain.models.torch_patches import is_in_backward
from bigtrain.models.transformers_patches import modules_of_experts


class ExpertCounts:
    """Counts by hooks on the experts modules of `model` that transformers' decorator marks.

    Counts every token of a training forward pass once: nothing before `begin`, in evaluation mode,
    or when the backward pass recomputes a layer. Does not wait for the device. Not for compiled
    layers: the counting would become a part of their graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules()}
        found: dict[str, Any] = {names[module]: module for module in modules_of_experts(model)}
        self.modules: dict[str, Any] = found
        self.num_experts = {name: int(module.num_experts) for name, module in found.items()}
        self._counts: dict[str, torch.Tensor] = {}
        self._is_counting = False
        self._hooks = [
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, module in found.items()
        ]

    def begin(self, *, counting: bool) -> None:
        """Reset the counts; `counting`: whether to count from here on."""
        self._counts.clear()
        self._is_counting = counting

    def of(self, name: str, device: torch.device) -> torch.Tensor:
        """Tokens of this rank that chose each expert of module `name`, int64 [experts]; a token
        counts for each of the experts it has chosen."""
        counted = self._counts.get(name)
        if counted is None:
            return torch.zeros(self.num_experts[name], dtype=torch.int64, device=device)
        return counted[:-1]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_counting or not module.training or is_in_backward():
            return
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        chosen = chosen.reshape(-1)
        last = self.num_experts[name]
        counts = self._counts.get(name)
        if counts is None:
            # One more for "no expert": some routers may choose to leave a token unchanged.
            counts = chosen.new_zeros(last + 1, dtype=torch.int64)
            self._counts[name] = counts
        # Not `bincount`, whose output length makes the host wait.
        places = chosen.clamp(max=last).long()
        counts.scatter_add_(0, places, torch.ones_like(places))
