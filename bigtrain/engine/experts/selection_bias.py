"""Balance without a loss: a bias of each expert, by which tokens choose and are not weighted.

Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import nn

from bigtrain.engine.experts.load import ExpertLoad
from bigtrain.engine.optimizers.exact_parameters import ExactParameters
from bigtrain.models.experts.selection_biases import selection_biases


class BiasUpdate:
    """The update of the biases by which tokens of `model` choose experts.

    Biases are float32 also where parameters are of 16 bit: small updates would be lost there. Those
    that are buffers are made so here; those that are parameters are values of `exact`. rate: of an
    update; 0 makes none.
    """

    def __init__(
        self, model: nn.Module, load: ExpertLoad, rate: float, exact: ExactParameters
    ) -> None:
        self.rate = rate
        self._load = load
        self._biases: dict[str, torch.Tensor] = {}
        # Other parameters are trained, or are not to be updated.
        for bias in selection_biases(model, exact.values.keys()):
            if not bias.is_parameter:
                bias.tensor.data = bias.tensor.data.float()
            if rate:
                exact_value = exact.values.get(bias.name)
                self._biases[bias.experts] = bias.tensor if exact_value is None else exact_value
                exact.owned.update({bias.name} & exact.values.keys())

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the parameters: raise the biases of experts that fewer tokens of the
        global batch than the mean have chosen, lower the others'. Collective over the replicas."""
        for name, bias in self._biases.items():
            counts = self._load.of_replicas(name).double()
            step = self.rate * torch.sign(counts.mean() - counts)
            bias += step.to(bias.dtype).view_as(bias)
