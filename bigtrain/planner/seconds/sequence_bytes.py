"""Bytes that sequence parallelism exchanges in one layer for a micro-batch. Pure.

Ulysses exchanges queries, keys, values and outputs, and in the backward pass their gradients: of
each what is not a rank's own. A ring exchanges keys and values in both passes, and in the backward
pass the gradients of both in float32. Under a causal mask without documents and windows a rank
needs the keys of three of four chunks of the other ranks on average
(`bigtrain.models.parallel.ring_plan`); documents and windows need fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bigtrain.planner.model_costs import Attention

GRADIENT_BYTES = 4
NEEDED = 0.75
"""Share of other ranks' keys that a rank needs on average under a causal mask."""


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes of one rank, layer and micro-batch. heads: of queries, keys, values and outputs, before
    Ulysses. keys: of keys and values after it. gradients: of their gradients in float32."""

    heads: float
    keys: float
    gradients: float
    ulysses_size: int
    ring_size: int

    @property
    def sent_forward(self) -> float:
        """Bytes that a rank sends in the forward pass, on average over the ranks."""
        return self._heads_sent + self._others * self.keys

    @property
    def sent_backward(self) -> float:
        """Bytes that a rank sends in the backward pass, on average over the ranks."""
        return self._heads_sent + self._others * (self.keys + self.gradients)

    @property
    def _heads_sent(self) -> float:
        return self.heads * (self.ulysses_size - 1) / self.ulysses_size

    @property
    def _others(self) -> float:
        return NEEDED * (self.ring_size - 1)


def sequence_bytes(
    attention: Attention,
    tokens: float,
    element_bytes: int,
    degrees: tuple[int, int, int],
) -> SequenceBytes:
    """Return the bytes of `tokens` of one rank. `degrees`: tensor-parallel, Ulysses' and the ring's
    size. Where Ulysses' ranks outnumber the key heads of a rank, keys are copied."""
    tensor, ulysses, ring = degrees
    key_heads = attention.num_key_value_heads / tensor
    if ulysses > 1 and key_heads >= 1:
        key_heads = math.lcm(int(key_heads), ulysses)
    width = attention.head_size + attention.value_size
    keys = tokens * key_heads * width
    heads = tokens * attention.num_heads / tensor * width + keys
    return SequenceBytes(
        heads * element_bytes, keys * element_bytes, keys * GRADIENT_BYTES, ulysses, ring
    )
