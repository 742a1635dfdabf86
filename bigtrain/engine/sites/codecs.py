"""How weights are encoded for the exchange between sites. No communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Codec:
    """How the weights of a site are encoded.

    dtype: of the codes. is_relative: whether they are differences to the global weights, which are
    the same on all sites before an outer step; else they are the weights themselves.
    """

    dtype: torch.dtype
    is_relative: bool

    def encode(self, local: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Codes [N] of `local` weights beside the global `weights`, both float32 [N]."""
        return (local - weights if self.is_relative else local).to(self.dtype)

    def decode(self, codes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Float32 weights [N] that `codes` [N] stand for; new memory."""
        values = codes.to(torch.float32, copy=True)
        return values.add_(weights) if self.is_relative else values


CODECS = {
    "float32": Codec(torch.float32, is_relative=False),  # absolute, so that nothing is rounded
    "bfloat16": Codec(torch.bfloat16, is_relative=True),  # absolute weights would lose 16 bits
}


def sent_bytes(num_elements: int, num_sites: int, codec: str) -> int:
    """Bytes that one rank sends in an outer step for its `num_elements`, without headers.

    It sends ``S - 1`` parts of ``ceil(N / S)`` elements to those that take their means, and the
    mean of its own part to the ``S - 1`` others. It receives as many.
    """
    part = -(-num_elements // num_sites)
    return 2 * (num_sites - 1) * part * CODECS[codec].dtype.itemsize
