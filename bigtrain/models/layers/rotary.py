"""Rotary embeddings that depend on the sequence length, chosen by each document's own length.

With rope type ``longrope`` (Phi-3) transformers switches to other frequencies as soon as one
position of its input exceeds ``original_max_position_embeddings``: a micro-batch would change with
its longest document, and sequence-parallel ranks would choose by their part. Here the model's own
module computes both, and each token takes the one for its document's length. Rope type ``dynamic``
changes only beyond ``max_position_embeddings``, which no run may exceed
(`bigtrain.settings.compatibility.check`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bigtrain.models.configuration import text_config
from bigtrain.models.layers.document_masks import document_numbers
from bigtrain.models.torch_patches import shadow, unshadow

Lengths = Callable[[torch.Tensor], torch.Tensor]
"""From positions as a model gets them [B, t] to the length of each token's document: [B, t]."""

# transformers writes the frequencies that it chose to the module, and threads may share it.
_LOCK = threading.Lock()


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Length of each token's document: int64 like `position_ids` [B, T] of full samples. Computed
    on their device, without waiting for it."""
    numbers = document_numbers(position_ids)
    counts = torch.zeros_like(numbers).scatter_add_(1, numbers, torch.ones_like(numbers))
    return counts.gather(1, numbers)


def choose_by_document(
    model: PreTrainedModel, lengths: Lengths = document_lengths
) -> Callable[[], None]:
    """Make the rotary embeddings of `model` choose by document; returns an undo function. A later
    call replaces an earlier one. Models without such embeddings stay as they are."""
    changed = [module for module in model.modules() if _chooses(module)]
    for module in changed:
        shadow(module, "forward", partial(_forward, module, lengths))

    def undo() -> None:
        for module in changed:
            unshadow(module, "forward")

    return undo


def _chooses(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return "longrope" in (kinds.values() if isinstance(kinds, dict) else (kinds,))


def _forward(
    module: Any,
    lengths: Lengths,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Any:
    """Return the module's own cosines and sines [B, t, D], or both in one complex tensor."""
    more = {} if layer_type is None else {"layer_type": layer_type}
    own = partial(type(module).forward, module, x, **more)
    kinds: Any = module.rope_type
    if (kinds if layer_type is None else kinds[layer_type]) != "longrope":
        return own(position_ids=position_ids)
    parameters = text_config(module.config).rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    longest: int = parameters["original_max_position_embeddings"]
    beyond = position_ids.new_full((*position_ids.shape[:-1], 1), longest)
    with _LOCK:
        short = own(position_ids=position_ids.clamp(max=longest - 1))
        # One more position, beyond the limit, selects the long frequencies for all.
        long = own(position_ids=torch.cat([position_ids, beyond], -1))
    is_long = (lengths(position_ids) > longest)[..., None]

    def chosen(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(is_long, other[..., :-1, :], one)

    if torch.is_tensor(short):
        return chosen(short, long)
    return tuple(chosen(one, other) for one, other in zip(short, long, strict=True))
