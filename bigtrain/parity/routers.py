"""Router losses and selection biases of a mixture of experts in a plain training loop. Independent
implementation, from transformers' outputs. The values depend on the division of a step's samples,
so the reference uses the division of the compared topology."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from bigtrain.models.equivalence.parameter_plan import find_gradient_reach
from bigtrain.models.experts import SelectionBias, has_auxiliary_loss, selection_biases
from bigtrain.settings.run_config import MoeSection

AUXILIARY, Z_LOSS, BIAS_RATE = 0.5, 0.05, 0.02
"""Minimum coefficient of a term in a comparison, so that an error in it is detected."""


@dataclass(frozen=True)
class StepDivision:
    """Division of a step by a topology: samples of a rank's micro-batch, and ranks with different
    samples."""

    micro_batch_size: int
    data_size: int

    def chunks(self, samples: int, section: MoeSection) -> list[torch.Tensor]:
        """Return groups of samples, for each of which a router loss is computed: the micro-batch of
        a rank, or the micro-batches of all ranks."""
        size = self.micro_batch_size
        if section.auxiliary_loss == "global_batch":
            size *= self.data_size
        return list(torch.arange(samples).split(size))


def can_join_forward_passes(model: Any) -> bool:
    """Return whether the auxiliary loss can be computed from the logits of several forward
    passes."""
    return hasattr(sys.modules[type(model).__module__], _FORMULA) and hasattr(
        model, "num_experts_per_tok"
    )


_FORMULA = "load_balancing_loss_func"


def _router_logits(outputs: Sequence[Any]) -> torch.Tensor:
    """Return the router logits of all layers and passes, [tokens, experts]."""
    return torch.cat([layer for output in outputs for layer in output.router_logits])


class RouterTerms:
    """Router losses, and selection biases if the run updates them, of a plain model in training."""

    def __init__(self, model: Any, section: MoeSection, sequence_length: int) -> None:
        self._model, self._section = model, section
        is_on = has_auxiliary_loss(model.config)
        self._coefficient = float(model.config.router_aux_loss_coef) if is_on else 0.0
        if section.z_loss_coefficient:
            model.config.output_router_logits = True
        self._is_routed: list[torch.Tensor] = []
        self._counts: dict[str, torch.Tensor] = {}
        self.biases: list[SelectionBias] = []
        if section.bias_update_rate:
            untrained = find_gradient_reach(model.config, sequence_length).absent or ()
            self.biases = selection_biases(model, untrained)
        modules = dict(model.named_modules())
        for bias in self.biases:
            count = partial(self._count, bias.experts)
            modules[bias.experts].register_forward_pre_hook(count, with_kwargs=True)

    @property
    def is_on(self) -> bool:
        """True if any loss is added."""
        return bool(self._coefficient or self._section.z_loss_coefficient)

    def begin_step(self) -> None:
        """Begin an optimizer step."""
        self._is_routed.clear()
        self._counts.clear()

    def of(self, outputs: Sequence[Any]) -> torch.Tensor:
        """Return the router losses of a chunk of samples, from the outputs of its forward
        passes."""
        total = torch.zeros(())
        if self._coefficient:
            total = total + self._coefficient * self._auxiliary(outputs)
        if self._section.z_loss_coefficient:
            z_loss = _router_logits(outputs).float().exp().sum(-1).log().square().mean()
            total = total + self._section.z_loss_coefficient * z_loss
        return total

    def _auxiliary(self, outputs: Sequence[Any]) -> torch.Tensor:
        """Return the load-balancing loss, without its coefficient."""
        model = self._model
        if self._section.auxiliary_loss == "global_batch":
            # experts * sum(f_i P_i), with the fractions f of the step so far.
            logits = _router_logits(outputs)
            top_k, num_experts = int(model.config.num_experts_per_tok), logits.shape[-1]
            is_routed = F.one_hot(logits.topk(top_k, -1).indices, num_experts).sum(1).float()
            self._is_routed.append(is_routed)
            fractions = torch.cat(self._is_routed).mean(0)
            return num_experts * (fractions * logits.softmax(-1).mean(0)).sum()
        if len(outputs) == 1:
            return cast(torch.Tensor, outputs[0].aux_loss)
        # transformers' formula, on the logits of all passes.
        formula = getattr(sys.modules[type(model).__module__], _FORMULA)
        passes_by_layer = zip(*(output.router_logits for output in outputs), strict=True)
        logits_by_layer = tuple(map(torch.cat, passes_by_layer))
        loss = formula(logits_by_layer, model.num_experts, model.num_experts_per_tok)
        return cast(torch.Tensor, loss)

    @torch.no_grad()
    def update_biases(self) -> None:
        """Update the biases after an update of the parameters, by the tokens of the full step."""
        for bias in self.biases:
            counts = self._counts[bias.experts].double()
            step = self._section.bias_update_rate * (counts.mean() - counts).sign()
            bias.tensor.add_(step.to(bias.tensor.dtype).view_as(bias.tensor))

    def _count(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        """Count the tokens of each expert, before a forward pass of the experts `name`."""
        if not module.training:
            return
        expert_ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        num_experts = int(module.num_experts)  # larger ids count for an extra one, then dropped
        expert_ids = expert_ids.flatten().clamp(max=num_experts).long()
        counts = F.one_hot(expert_ids, num_experts + 1).sum(0)[:-1]
        self._counts[name] = self._counts.get(name, torch.zeros_like(counts)) + counts
