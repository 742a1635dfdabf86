"""Which experts tokens are sent to, counted in a model under training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.models.transformers_patches import modules_of_experts


class Choices:
    """How many tokens have chosen which set of experts, by layer: ``"NAME: 0 3" -> 17``."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: Counter[str] = Counter()
        names = {module: name for name, module in model.named_modules()}
        for module in modules_of_experts(model):
            self._watch(module, names[module])

    def _watch(self, module: nn.Module, name: str) -> None:
        def note(_module: nn.Module, inputs: Any) -> None:
            rows = inputs[1].reshape(-1, inputs[1].shape[-1]).sort(-1).values
            chosen, counts = torch.unique(rows, dim=0, return_counts=True)
            for row, count in zip(chosen.tolist(), counts.tolist(), strict=True):
                self.counts[f"{name}: {' '.join(map(str, row))}"] += count

        module.register_forward_pre_hook(note)

    def of_all_ranks(self, *, counted: bool) -> dict[str, int]:
        """Summed over `counted` ranks: of those with the same tokens one. Collective."""
        found: Any = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.counts if counted else Counter())
        return dict(sum(found, Counter()))
