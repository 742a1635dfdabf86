"""How many tokens choose each expert, counted on the device as a model trains."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from bigtrain.models.torch_patches import is_in_backward
from bigtrain.models.transformers_patches import modules_of_experts


class ExpertCounts:
    """Watches the modules of experts of `model` that transformers' decorator has made.

    Nothing is counted until `begin`, nor in evaluation mode, nor where the backward pass computes
    a layer again: what is counted is every token of a forward pass in training, once. Nothing waits
    for the device. Not for compiled layers: what is counted inside would be a part of their graphs.
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
        """Forget what was counted, and count from here on, or do not."""
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
        """Take the hooks off the model."""
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
            # One more for what is no expert: some routers may choose to leave a token as it is.
            counts = chosen.new_zeros(last + 1, dtype=torch.int64)
            self._counts[name] = counts
        # Not `bincount`, for whose length the host waits.
        places = chosen.clamp(max=last).long()
        counts.scatter_add_(0, places, torch.ones_like(places))
