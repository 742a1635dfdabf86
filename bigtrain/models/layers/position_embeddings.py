"""Positions as a model counts them itself.

Positions that bigtrain makes count from 0 in each document. A model that takes them gets the
numbers that it would have counted (RoBERTa's family begins with another number than 0), and
position embeddings of a model that counts without looking at `position_ids` (decoders of BART's
family) get the positions of the documents, or of a rank's tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bigtrain.models.layers.document_masks import PLAIN_NUMBERING, PositionNumbering
from bigtrain.models.torch_patches import shadow, unshadow

Positions = Callable[[], torch.Tensor | None]
"""Returns the positions of the running forward pass, int64 [B, t] on any device; None: they count
from 0 in each sample."""
_NAME = "position_ids"

Numbers = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
"""From the token ids and positions of a forward pass to the model's numbers of the positions."""
_NUMBERS, _NUMBERING = "bigtrain_numbers", "bigtrain_numbering"
"""Attributes of a model."""


def number_positions(model: nn.Module, numbering: PositionNumbering) -> Callable[[], None]:
    """Make `model` apply `numbering` to the positions that it is given, which count from 0; returns
    an undo function."""
    shadow(model, _NUMBERING, numbering)
    undo_numbers = replace_numbers(model, numbering.numbers)

    def undo() -> None:
        undo_numbers()
        unshadow(model, _NUMBERING)

    return undo


def numbering_of(model: nn.Module) -> PositionNumbering:
    """Return the numbering that `number_positions` gave to `model`."""
    numbering: PositionNumbering = vars(model).get(_NUMBERING, PLAIN_NUMBERING)
    return numbering


def replace_numbers(model: nn.Module, numbers: Numbers) -> Callable[[], None]:
    """Make `model` read `numbers` of the positions that it is given, in place of what an earlier
    call set; returns a function that sets that again. In every call of the model, also in front of
    a stage or of a chunked loss."""
    before = vars(model).get(_NUMBERS)
    shadow(model, _NUMBERS, numbers)
    if before is not None:
        return lambda: shadow(model, _NUMBERS, before)
    hook = model.register_forward_pre_hook(_give_numbers, with_kwargs=True)

    def undo() -> None:
        hook.remove()
        unshadow(model, _NUMBERS)

    return undo


def _give_numbers(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    positions = kwargs.get(_NAME)
    if positions is None:
        return None
    numbers: Numbers = vars(model)[_NUMBERS]
    return args, {**kwargs, _NAME: numbers(kwargs.get("input_ids"), positions)}


def position_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the embeddings of `model` that take positions and other arguments."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module) is not nn.Embedding:
            if _NAME in inspect.signature(type(module).forward).parameters:
                yield module


def embed_positions(model: nn.Module, positions: Positions) -> Callable[[], None]:
    """Make embeddings of `model` that are given no positions, or the same for each sample, embed
    `positions`; returns an undo function. A later call replaces an earlier one."""
    changed = list(position_embeddings(model))
    for module in changed:
        shadow(module, "forward", partial(_forward, module, positions))

    def undo() -> None:
        for module in changed:
            unshadow(module, "forward")

    return undo


def _forward(module: Any, positions: Positions, *args: Any, **kwargs: Any) -> torch.Tensor:
    embed = partial(type(module).forward, module)
    given_positions, sample_positions = kwargs.get(_NAME), positions()
    if sample_positions is None or (given_positions is not None and given_positions.ndim > 1):
        output: torch.Tensor = embed(*args, **kwargs)
        return output
    sample_positions = sample_positions.to(module.weight.device, non_blocking=True)
    # Classes expect the positions of one sample: some add a dimension.
    rows = [embed(*args, **{**kwargs, _NAME: row}) for row in sample_positions]
    return torch.stack([row.reshape(sample_positions.shape[1], -1) for row in rows])
