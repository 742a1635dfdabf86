"""What transformers records of routers in a forward pass, for the model's auxiliary loss.

The loss (``load_balancing_loss_func``, Switch Transformer's equations 4 to 6) multiplies two means
over all tokens and layers, so it is no sum over parts of either: a part needs the others' logits.
"""

from __future__ import annotations

from typing import Any

import torch

from bigtrain.models.transformers_patches import collected_outputs

KEY = "router_logits"


def recorded() -> list[torch.Tensor] | None:
    """The router logits of the forward pass under way, in the order of layers; append what layers
    elsewhere computed. None where they are not asked for (``output_router_logits``)."""
    # A model whose logits do not come here computes another loss in stages, which the proof finds.
    collected = collected_outputs()
    return None if collected is None else collected.get(KEY)


def auxiliary_loss(outputs: Any) -> torch.Tensor | None:
    """The loss that a model computed of its router logits; None where there is none."""
    loss = getattr(outputs, "aux_loss", None)
    return loss if torch.is_tensor(loss) else None
