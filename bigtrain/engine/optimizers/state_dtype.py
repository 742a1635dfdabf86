"""The dtype of optimizer states, and stochastic rounding to bfloat16.

With round-to-nearest, a moment whose change is below bfloat16's resolution would never change. So
rounding is stochastic, with the right mean. The randomness is a hash of the element's gradient and
value, so a resumed run rounds in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import torch

_CHUNK = 1 << 24
"""Elements converted to float32 at a time."""


class StateDtype(Enum):
    """Of moments and momentum."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self is StateDtype.FLOAT32 else torch.bfloat16


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Equally shaped contiguous tensors, piece by piece, as 1-D views."""
    flat = [tensor.view(-1) for tensor in tensors]
    return zip(*(tensor.split(_CHUNK) for tensor in flat), strict=True)


def store(moment: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> None:
    """Write the float32 `value` into `moment` of either dtype; `gradient` seeds the rounding."""
    if moment.dtype == torch.float32:
        if moment.data_ptr() != value.data_ptr():
            moment.copy_(value)
    else:
        moment.copy_(_rounded(value, gradient))


def _rounded(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`value` with the last 16 bits of its fraction rounded away, up as often as they are large."""
    bits = value.contiguous().view(torch.int32)
    noise = _hash(gradient.contiguous().view(torch.int32) * 3 ^ bits) & 0xFFFF
    return ((bits + noise) & ~0xFFFF).view(torch.float32)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """32 bits of which each depends on all of `x` (Wellons, "hash-prospector", lowbias32)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)
