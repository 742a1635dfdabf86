"""The router losses added to the loss of a micro-batch: auxiliary loss and z-loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.models.experts.router_logits import (
    Routing,
    ask_for_router_logits,
    auxiliary_loss,
    balance_loss,
    router_logits_of,
    z_loss,
)
from bigtrain.settings.sections.model import MoeSection


class RouterLosses:
    """The auxiliary loss of a run's routers, weighted, for a micro-batch at a time.

    ``auxiliary_loss: global_batch`` is transformers' formula with the fractions of tokens that
    choose each expert taken over the global batch (Qiu et al. 2025, arXiv 2501.11873, equation 4):
    all ranks' micro-batches of this number, and those of the step before it. Its mean over ranks
    is the formula of their micro-batches as one. Asks `model` for router logits where
    `section` needs them.
    """

    def __init__(self, model: nn.Module, section: MoeSection, replicas: dist.ProcessGroup) -> None:
        config: Any = model.config
        is_on = bool(getattr(config, "output_router_logits", True))
        coefficient = getattr(config, "router_aux_loss_coef", 0.0) or 0.0
        self.aux_coefficient = float(coefficient) if is_on else 0.0
        self._section, self._replicas = section, replicas
        self._top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        self._chosen: torch.Tensor | None = None
        if section.z_loss_coefficient:
            ask_for_router_logits(model)

    def begin_step(self) -> None:
        """An optimizer step begins."""
        self._chosen = None

    def of(self, outputs: Any) -> torch.Tensor | None:
        """The router loss from a model's outputs for a micro-batch; None if nothing is added.

        Collective over the replicas with ``auxiliary_loss: global_batch``.
        """
        total = None
        section = self._section
        if section.auxiliary_loss == "global_batch":
            total = self.aux_coefficient * self._of_global_batch(router_logits_of(outputs))
        elif (own := auxiliary_loss(outputs)) is not None and self.aux_coefficient:
            total = self.aux_coefficient * own
        if section.z_loss_coefficient:
            added = section.z_loss_coefficient * z_loss(router_logits_of(outputs))
            total = added if total is None else total + added
        return total

    def _of_global_batch(self, logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
        routing = Routing.of(logits, self._top_k)
        everyone = torch.cat([routing.chosen, routing.chosen.new_full((1,), routing.num_rows)])
        dist.all_reduce(everyone, group=self._replicas)
        self._chosen = everyone if self._chosen is None else self._chosen + everyone
        return balance_loss(self._chosen[:-1] / self._chosen[-1], routing.probabilities)
