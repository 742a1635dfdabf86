"""Gradients of parameters that are computed in parts: the sum of the parts, and copies of the
parameters for which no hooks run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from bigtrain.models.torch_patches import shadow, unshadow


class GradientSum:
    """A sum of gradients like `parameter`, in float32 from the second gradient on."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._like = parameter
        self._first: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        if self.is_empty:
            self._first = gradient
            return
        if self._total is None:
            assert self._first is not None
            self._total, self._first = self._first.float(), None
        self._total += gradient

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._first is None and self._total is None

    def value(self) -> torch.Tensor:
        """Return the sum in the parameter's dtype; zeros if it is empty."""
        total = self._total if self._total is not None else self._first
        return torch.zeros_like(self._like) if total is None else total.to(self._like.dtype)


@contextmanager
def substituted(
    module: nn.Module, parameters: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let `module` compute with `leaves` instead of `parameters` inside, so that the
    parameters' hooks do not run per part; parameters of ZeRO-3 are gathered here."""
    shadowed_attributes: list[tuple[nn.Module, str]] = []
    leaf_by_id = dict(zip(map(id, parameters), leaves, strict=True))
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in leaf_by_id:
                shadow(owner, name, leaf_by_id[id(parameter)])
                shadowed_attributes.append((owner, name))
    try:
        yield
    finally:
        for owner, name in shadowed_attributes:
            unshadow(owner, name)
