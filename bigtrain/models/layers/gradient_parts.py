"""Gradients that are computed in parts: sums of the parts, copies of parameters for which no hooks
run, and functions whose gradients are computed with their values or in the backward pass.

Shapes: N = tokens in all, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


class ChunkGradients:
    """Gradients of hidden states `rows` [N, H] and of the `weights` of `head`, added up chunk by
    chunk. Copies of the weights are the leaves of a chunk's graph, so that the parameters' hooks do
    not run per chunk."""

    def __init__(
        self, head: nn.Module, rows: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> None:
        self._head, self._rows, self._weights = head, rows, weights
        self._grad_rows = torch.empty_like(rows)
        self._sums = [GradientSum(w) if w.requires_grad else None for w in weights]

    def add(
        self,
        part: slice,
        function: Callable[[torch.Tensor], torch.Tensor],
        upstream: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return `function` of the chunk `part`, and add its gradients for the gradient `upstream`
        of the result."""
        chunk = self._rows[part].requires_grad_()
        leaves = [w.detach().requires_grad_(w.requires_grad) for w in self._weights]
        with torch.enable_grad(), substituted(self._head, self._weights, leaves):
            result = function(chunk)
        differentiated = [chunk, *(leaf for leaf in leaves if leaf.requires_grad)]
        gradients = torch.autograd.grad(result, differentiated, upstream)
        self._grad_rows[part] = gradients[0]
        trained = [total for total in self._sums if total is not None]
        for total, gradient in zip(trained, gradients[1:], strict=True):
            total.add(gradient)
        return result.detach()

    def values(self, hidden: torch.Tensor, index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the gradients of `hidden`, 0 for tokens that are not in `index`, and of the
        weights."""
        rows = self._grad_rows
        if index is not None:
            rows = torch.zeros_like(hidden).flatten(0, -2).index_copy_(0, index, rows)
        grad_weights = (None if total is None else total.value() for total in self._sums)
        return [rows.view(hidden.shape), *grad_weights]


class EagerGradients(torch.autograd.Function):
    """Computes a loss together with its gradients, and scales them in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., torch.Tensor],
        mantissa: torch.Tensor | None,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.mantissa, ctx.gradients = mantissa, []
        return compute(hidden, weights, ctx.gradients, mantissa)

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "a second backward pass through the same loss"
        # In place, since the gradient of the head is as large as the head.
        remaining_factor = factors[0] if ctx.mantissa is None else factors[0] / ctx.mantissa
        return (None, None, *(None if g is None else g.mul_(remaining_factor) for g in gradients))


class LateGradients(torch.autograd.Function):
    """Computes values of tokens without a graph, and their gradients in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[torch.Tensor], torch.Tensor],
        differentiate: Callable[..., tuple[torch.Tensor | None, ...]],
        hidden: torch.Tensor,
        *_weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.differentiate = differentiate
        ctx.save_for_backward(hidden)
        return compute(hidden)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        return None, None, *ctx.differentiate(hidden, upstream[0])
