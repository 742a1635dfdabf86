"""Bytes that sequence parallelism exchanges in one layer for a micro-batch. Pure.

Ulysses exchanges queries, keys, values and outputs, and their gradients in the backward pass,
except for the part that a rank keeps. A ring exchanges keys and values in both passes, and in the
backward pass their gradients in float32. Under a causal mask without documents and windows a
rank needs the keys of three of four chunks per peer on average
(`bigtrain.models.parallel.ring_plan`); documents and windows need fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bigtrain.planner.model_costs import Attention

GRADIENT_BYTES = 4


@dataclass(frozen=True)
class SequenceBytes:
    """Bytes per rank, layer and micro-batch. heads: of queries, keys, values and outputs, before
    Ulysses. keys: of keys and values after it. gradients: of the keys' and values' gradients, in
    float32."""

    heads: float
    keys: float
    gradients: float


def sequence_bytes(
    attention: Attention,
    num_tokens: float,
    element_bytes: int,
    *,
    tensor_size: int,
    ulysses_size: int,
) -> SequenceBytes:
    """Return the bytes of a rank's `num_tokens`. Where Ulysses' ranks outnumber the key heads of
    a rank, keys are copied."""
    key_heads = attention.num_key_value_heads / tensor_size
    if ulysses_size > 1 and key_heads >= 1:
        key_heads = math.lcm(int(key_heads), ulysses_size)
    width = attention.head_size + attention.value_size
    num_keys = num_tokens * key_heads * width
    num_head_elements = num_tokens * attention.num_heads / tensor_size * width + num_keys
    return SequenceBytes(
        heads=num_head_elements * element_bytes,
        keys=num_keys * element_bytes,
        gradients=num_keys * GRADIENT_BYTES,
    )
