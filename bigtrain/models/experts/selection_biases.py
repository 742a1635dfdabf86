"""The biases added to router scores when tokens choose experts, for architectures with them."""

from __future__ import annotations

import torch
from torch import nn

from bigtrain.models.transformers_patches import modules_of_experts

_NAME = "e_score_correction_bias"


def selection_biases(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers [experts] by name of the module of experts that tokens choose from.

    Such a buffer has DeepSeek-V3's name, which others have adopted, an element for each expert, and
    is in the block that holds the experts.
    """
    modules = dict(model.named_modules())
    experts = set(modules_of_experts(model))
    found = {}
    for name, module in modules.items():
        if module not in experts:
            continue
        block, shape = modules[name.rpartition(".")[0]], (int(module.num_experts),)
        biases = [
            buffer
            for key, buffer in block.named_buffers()
            if key.rpartition(".")[2] == _NAME and tuple(buffer.shape) == shape
        ]
        if len(biases) == 1:
            found[name] = biases[0]
    return found
