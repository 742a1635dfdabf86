"""Rotary embeddings that depend on the sequence length, chosen by each document's length.

With rope type ``longrope`` (Phi-3) transformers switches to other frequencies as soon as an input
position exceeds ``original_max_position_embeddings``: a micro-batch would change with its
longest document, and sequence-parallel ranks would choose by their part. Here the model's module
computes the short and the long embeddings, and each token takes the embeddings for its document's
length. Rope type ``dynamic`` changes only beyond ``max_position_embeddings``, which no run may
exceed (`bigtrain.settings.compatibility.check`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from bigtrain.models.configuration import text_config
from bigtrain.models.layers.document_masks import document_numbers
from bigtrain.models.torch_patches import shadow, unshadow

Lengths = Callable[[torch.Tensor], torch.Tensor]
"""From positions as a model gets them [B, t] to the length of each token's document: [B, t]."""

# transformers writes the current frequencies to the module, and threads may share the module.
_LOCK = threading.Lock()


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the length of every token's document: int64 like `position_ids` [B, T] of full
    samples. Computed on their device, without waiting for it."""
    numbers = document_numbers(position_ids)
    counts = torch.zeros_like(numbers).scatter_add_(1, numbers, torch.ones_like(numbers))
    return counts.gather(1, numbers)


def choose_by_document(
    model: PreTrainedModel, lengths: Lengths = document_lengths
) -> Callable[[], None]:
    """Make the rotary embeddings of `model` choose by document; returns an undo function. A later
    call replaces an earlier one. Models without ``longrope`` stay as they are."""
    changed = []
    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)
        if "longrope" in (rope_types.values() if isinstance(rope_types, dict) else (rope_types,)):
            changed.append(module)
    for module in changed:
        shadow(module, "forward", partial(_forward, module, lengths))

    def undo() -> None:
        for module in changed:
            unshadow(module, "forward")

    return undo


def _forward(
    module: Any,
    lengths: Lengths,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Any:
    """Return cosines and sines [B, t, D], or one complex tensor, as the module returns them."""
    layer_options = {} if layer_type is None else {"layer_type": layer_type}
    module_forward = partial(type(module).forward, module, x, **layer_options)
    rope_types: Any = module.rope_type
    if (rope_types if layer_type is None else rope_types[layer_type]) != "longrope":
        return module_forward(position_ids=position_ids)
    parameters = text_config(module.config).rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    longest: int = parameters["original_max_position_embeddings"]

    # The module selects frequencies by the largest position: with positions below the limit the
    # short frequencies, with one more position, beyond the limit, the long ones for all tokens.
    beyond = position_ids.new_full((*position_ids.shape[:-1], 1), longest)
    with _LOCK:
        short = module_forward(position_ids=position_ids.clamp(max=longest - 1))
        long = module_forward(position_ids=torch.cat([position_ids, beyond], -1))

    # Each token takes the embeddings for the length of the document.
    is_long = (lengths(position_ids) > longest)[..., None]
    if torch.is_tensor(short):
        return torch.where(is_long, long[..., :-1, :], short)
    return tuple(
        torch.where(is_long, long_values[..., :-1, :], short_values)
        for short_values, long_values in zip(short, long, strict=True)
    )
