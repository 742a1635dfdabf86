"""Noise on embeddings in training (NEFTune, Jain et al. 2023, arXiv 2310.05914), as transformers
adds it (5.23, integrations/neftune.py, `neftune_post_forward_hook`).

Shapes: B = samples of a micro-batch, T = tokens of a sample, H = size of an embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def add_embedding_noise(model: PreTrainedModel, alpha: float, num_parts: int = 1) -> None:
    """Make the embedding of `model` add uniform noise to its output [B, T, H] in training mode.

    The noise is drawn from the device's default generator in the order of the micro-batches.
    `num_parts`: ranks that divide the tokens of a sample; each draws the noise of its part,
    and T counts the tokens of every rank. Ranks that hold parts of the embedding must have equal
    generators.
    """

    def add_noise(module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output
        # The largest noise of an element is alpha / sqrt(T H), equation 1 of the paper, in
        # transformers' rounding.
        num_elements = output.size(1) * num_parts * output.size(2)
        limit = float(alpha / torch.sqrt(torch.tensor(num_elements)))
        return output + torch.zeros_like(output).uniform_(-limit, limit)

    model.get_input_embeddings().register_forward_hook(add_noise)
