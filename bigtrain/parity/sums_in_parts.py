"""Linear layers with sums in another order, as a division of the work over ranks has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class SumsInParts(TorchFunctionMode):
    """Make linear layers add up `num_parts` partial sums inside the context, as `num_parts` ranks
    would: over inputs in the forward pass; over outputs, and over tokens, for the gradients."""

    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.num_parts = num_parts

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        product: torch.Tensor = _Linear.apply(input, weight, self.num_parts)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, num_parts: int
    ) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        ctx.num_parts = num_parts
        return _product(states, weight.t(), num_parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        states, weight = ctx.saved_tensors
        (gradient,) = gradients
        outputs, inputs = (x.reshape(-1, x.shape[-1]) for x in (gradient, states))
        weight_gradient = _product(outputs.t(), inputs, ctx.num_parts)
        return _product(gradient, weight, ctx.num_parts), weight_gradient, None


def _product(a: torch.Tensor, b: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return ``a @ b`` as a sum of `num_parts` partial products."""
    pairs = zip(a.tensor_split(num_parts, -1), b.tensor_split(num_parts, 0), strict=True)
    total, *products = (columns @ rows for columns, rows in pairs)
    for product in products:
        total = total + product
    return total
