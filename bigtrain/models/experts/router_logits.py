"""The router logits that transformers records in a forward pass, for the model's auxiliary loss.

The loss (``load_balancing_loss_func``, Switch Transformer's equations 4 to 6) multiplies two means
over all tokens and layers, so it is not a sum over parts: each part needs the others' logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.errors import ModelError
from bigtrain.models.transformers_patches import collected_outputs

KEY = "router_logits"


def recorded() -> list[torch.Tensor] | None:
    """The router logits of the current forward pass, in the order of layers; append those of other
    stages' layers. None unless they are asked for (``output_router_logits``)."""
    # If a model's logits do not come here, its loss in stages differs, which the trial finds.
    collected = collected_outputs()
    return None if collected is None else collected.get(KEY)


def auxiliary_loss(outputs: Any) -> torch.Tensor | None:
    """The loss that a model computed from its router logits; None if there is none."""
    loss = getattr(outputs, "aux_loss", None)
    return loss if torch.is_tensor(loss) else None


def ask_for_router_logits(model: Any) -> None:
    """Make a model return its router logits, as if its configuration said so."""
    model.config.output_router_logits = True


def router_logits_of(outputs: Any) -> tuple[torch.Tensor, ...]:
    """The logits of each layer's router [tokens, experts] that a model returned.

    Raises ModelError if it returned none.
    """
    found = getattr(outputs, KEY, None)
    if not isinstance(found, tuple) or not found or not all(map(torch.is_tensor, found)):
        raise ModelError("the model returns no router logits")
    return found


@dataclass(frozen=True)
class Routing:
    """The terms of the auxiliary loss, over all layers together, as in transformers.

    chosen: float32 [experts], tokens that choose each. probabilities: float32 [experts], means
    over `num_rows`, the tokens times layers; with gradients.
    """

    chosen: torch.Tensor
    probabilities: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, logits: tuple[torch.Tensor, ...], top_k: int) -> Routing:
        """logits: of each layer [tokens, experts]; a token chooses `top_k` experts of a layer."""
        chosen = torch.zeros(logits[0].shape[-1], device=logits[0].device)
        total = torch.zeros_like(chosen)
        for layer in logits:
            weights = torch.softmax(layer, dim=-1)
            places = weights.topk(top_k, dim=-1).indices.flatten()
            chosen.scatter_add_(0, places, torch.ones_like(places, dtype=chosen.dtype))
            total = total + weights.float().sum(0)
        num_rows = sum(layer.shape[0] for layer in logits)
        return cls(chosen, total / num_rows, num_rows)


def balance_loss(fractions: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Switch Transformer's equation 4: `fractions` [experts] of tokens that choose each expert,
    and the mean `probabilities` [experts] that routers give them."""
    return (fractions * probabilities).sum() * fractions.numel()


def z_loss(logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The mean over tokens and layers of the square of the logits' log-sum-exp (ST-MoE, Zoph et
    al. 2022, arXiv 2202.08906, equation 5)."""
    squares = [torch.logsumexp(layer.float(), -1).square().sum() for layer in logits]
    return torch.stack(squares).sum() / sum(layer.shape[0] for layer in logits)
