"""What one pipeline stage sends the next, as the flat tuple of tensors that DeepSpeed transfers.

DeepSpeed sends a gradient back for every floating tensor, into buffers it numbers by position
whatever their dtype (0.19.8, runtime/pipe/engine.py): so differentiable tensors come first, and
other floating ones travel as integers of the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.models.parallel.stages import Payload

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor of a payload: its number among the differentiable ones or the others."""

    number: int
    differentiable: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class P2PLayout:
    """How the payloads between two stages are laid out; the same for all micro-batches.

    form: a payload with slots in place of tensors.
    """

    form: Payload
    num_differentiable: int

    @staticmethod
    def of(payload: Payload) -> P2PLayout:
        """The layout of payloads like this one, computed with gradients enabled."""
        counts = {True: 0, False: 0}

        def slot(tensor: torch.Tensor) -> _Slot:
            kind = tensor.requires_grad
            counts[kind] += 1
            return _Slot(counts[kind] - 1, kind, tensor.dtype)

        return P2PLayout(payload.map(slot), counts[True])

    def pack(self, payload: Payload) -> tuple[torch.Tensor, ...]:
        """Differentiable tensors first. `payload` must have this layout's form."""
        differentiable: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        slots = iter(_slots(self.form))

        def take(tensor: torch.Tensor) -> None:
            if next(slots).differentiable:
                differentiable.append(tensor.contiguous())
            else:
                others.append(_as_integers(tensor.detach().contiguous()))

        payload.map(take)
        return (*differentiable, *others)

    def unpack(self, tensors: tuple[torch.Tensor, ...]) -> Payload:
        """The payload that `pack` made `tensors` from."""

        def fill(value: Any) -> Any:
            if isinstance(value, _Slot):
                if value.differentiable:
                    return tensors[value.number]
                return _as(tensors[self.num_differentiable + value.number], value.dtype)
            if isinstance(value, dict):
                return {key: fill(item) for key, item in value.items()}
            return tuple(fill(item) for item in value) if isinstance(value, tuple) else value

        form = self.form
        return Payload(fill(form.outputs), fill(form.shared), fill(form.router_logits))


def _slots(form: Any) -> list[_Slot]:
    if isinstance(form, Payload):
        return _slots((form.outputs, form.shared, form.router_logits))
    if isinstance(form, _Slot):
        return [form]
    items = form.values() if isinstance(form, dict) else form if isinstance(form, tuple) else ()
    return [slot for item in items for slot in _slots(item)]


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return tensor.view(_INTEGERS[tensor.element_size()])
    return tensor


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class _Touch(torch.autograd.Function):
    """`first` as it is, with a gradient of zeros for the others: DeepSpeed sends one for each."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return first.view_as(first)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (gradients[0], *(torch.zeros_like(other) for other in ctx.saved_tensors))


def touch(first: torch.Tensor, others: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`first`, made to depend on `others` without a value, so that all of them get a gradient."""
    result: torch.Tensor = _Touch.apply(first, *others)  # type: ignore[no-untyped-call]
    return result
