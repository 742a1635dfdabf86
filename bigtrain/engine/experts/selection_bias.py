"""Balance without a loss: a bias of each expert, by which tokens choose and are not weighted.

Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import nn

from bigtrain.engine.experts.load import ExpertLoad
from bigtrain.models.experts.selection_biases import selection_biases


class SelectionBias:
    """The biases by which tokens of `model` choose experts, where its routers have any.

    They are buffers, which DeepSpeed 0.19.8 leaves in float32 also where parameters are of 16 bit:
    small updates would be lost there. rate: of an update; 0 leaves them alone.
    """

    def __init__(self, model: nn.Module, load: ExpertLoad, rate: float) -> None:
        self.rate = rate
        self._load = load
        self._biases = selection_biases(model) if rate else {}

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the parameters: raise the biases of experts that fewer tokens of the
        global batch than the mean have chosen, lower the others'. Collective over the replicas."""
        for name, bias in self._biases.items():
            counts = self._load.of_replicas(name).double()
            bias += self.rate * torch.sign(counts.mean() - counts).to(bias.dtype)
