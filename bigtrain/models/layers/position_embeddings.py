"""Position embeddings of models that count positions themselves, without looking at `position_ids`
(decoders of BART's family): they get the positions of the documents, or of a rank's tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from bigtrain.models.torch_patches import shadow, unshadow

Positions = Callable[[], torch.Tensor | None]
"""Returns the positions of the running forward pass, int64 [B, t] on any device; None: they count
from 0 in each sample."""
_NAME = "position_ids"


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
