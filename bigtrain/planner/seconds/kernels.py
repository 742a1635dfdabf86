"""Seconds of the operations of a layer on one device. Pure.

Matrix products are counted in tiles: a device computes as many at once as it has multiprocessors,
and a last, partly filled wave takes as long as a full one ("wave quantization", NVIDIA's guide to
matrix multiplication performance). Small products are bound by memory instead.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from bigtrain.planner.model_costs import Attention, Matmul
from bigtrain.planner.tables.hardware import Device

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.7))
"""Rows, columns, and speed relative to the best tile (smaller tiles reuse loaded data less)."""


_NUM_LARGEST = 2  # tiles of the largest size: one, and the same turned
_ALIGNED = 8  # 16-bit elements: 16 bytes, the load size of tensor-core kernels
_UNALIGNED = 22.0
"""Slowdown of products of unaligned heads, which such kernels do not support: 10 of A100's 312
TFLOP/s by BigScience's two models with heads of 108 and 150 (train/tr11-176B-ml/
chronicles-prequel.md), which are 36% and 30% slower because of a tenth of their products."""
_LEAST_DEPTH = 512  # smallest inner dimension that is still split


@functools.lru_cache(maxsize=1 << 16)
def matmul_seconds(
    device: Device, rows: int, in_size: int, out_size: int, element_bytes: int, *, gain: float = 1.0
) -> float:
    """Return the seconds of ``rows x in_size`` times ``in_size x out_size``; `gain`: speed-up of a
    faster number format."""
    if min(rows, in_size, out_size) <= 0:
        return 0.0
    num_elements = rows * in_size + in_size * out_size + rows * out_size
    moving_seconds = element_bytes * num_elements / (device.memory_bandwidth * device.reach.memory)
    peak = device.peak_flops if element_bytes <= 2 else device.float32_flops or device.peak_flops
    peak *= device.matmul_factor * device.reach.matmul * gain
    if device.is_cpu:
        computing_seconds = 2.0 * rows * in_size * out_size / peak
        return max(computing_seconds, moving_seconds) + device.reach.kernel_seconds
    # The fastest tile: waves of as many tiles as the device has multiprocessors.
    fastest_seconds = math.inf
    tiles = _TILES[:_NUM_LARGEST] if device.reach.has_one_tile else _TILES
    for tile_rows, tile_columns, speed in tiles:
        num_tiles = math.ceil(rows / tile_rows) * math.ceil(out_size / tile_columns)
        num_waves = math.ceil(num_tiles / device.num_units)
        # If tiles are few, several multiprocessors share the inner dimension of a tile (split-K).
        depth = in_size / max(1, min(device.num_units // num_tiles, in_size // _LEAST_DEPTH))
        tile_flops = 2.0 * tile_rows * tile_columns * (depth + device.reach.matmul_depth)
        tile_seconds = num_waves * tile_flops * device.num_units / (peak * speed)
        fastest_seconds = min(fastest_seconds, tile_seconds)
    return max(fastest_seconds, moving_seconds) + device.reach.kernel_seconds


class PassCosts(NamedTuple):
    """Seconds or bytes of a forward and of a backward pass."""

    forward: float
    backward: float


class RankShare(NamedTuple):
    """Tokens of a rank, the degrees that divide its matrix products, and bytes of an element."""

    num_tokens: int
    tensor_size: int
    expert_size: int
    element_bytes: int


class _LocalProduct(NamedTuple):
    """Matrix product that a rank computes `times` times: ``rows x in_size`` by
    ``in_size x out_size``."""

    rows: int
    in_size: int
    out_size: int
    times: float


def _local_product(matmul: Matmul, share: RankShare) -> _LocalProduct:
    """Return the part of `matmul` that a rank computes.

    With expert parallelism a rank receives all tokens of its group of `expert_size` for its
    experts: as many tokens as without it, for fewer experts. Tensor parallelism does not divide
    experts then; each tensor-parallel rank sends a slice of the tokens.
    """
    num_tokens, tensor_size = share.num_tokens, share.tensor_size
    if matmul.num_groups > 1 and share.expert_size > 1:
        num_tokens, tensor_size = max(1, num_tokens // tensor_size), 1
    in_size = matmul.in_size // (tensor_size if matmul.cut == "in" else 1)
    out_size = matmul.out_size // (tensor_size if matmul.cut == "out" else 1)
    if matmul.num_groups == 1 and matmul.share == 1.0:
        return _LocalProduct(num_tokens, in_size, out_size, float(matmul.count))
    # Experts: assumes perfect load balance.
    num_experts = max(1, matmul.num_groups // share.expert_size)
    rows = max(1, round(num_tokens * matmul.share / num_experts))
    return _LocalProduct(rows, in_size, out_size, float(num_experts * matmul.count))


def weight_seconds(device: Device, matmul: Matmul, share: RankShare, gain: float) -> PassCosts:
    """Return the seconds of a product with a rank's shard of a weight; `gain`: as in
    `matmul_seconds`. The backward pass has two products: the gradients of inputs and weight."""
    rows, in_size, out_size, times = _local_product(matmul, share)
    size = share.element_bytes
    output_seconds = matmul_seconds(device, rows, in_size, out_size, size, gain=gain)
    input_gradient_seconds = matmul_seconds(device, rows, out_size, in_size, size, gain=gain)
    weight_gradient_seconds = matmul_seconds(device, in_size, rows, out_size, size, gain=gain)
    return PassCosts(
        times * output_seconds, times * (input_gradient_seconds + weight_gradient_seconds)
    )


_UNFUSED_CAST_BYTES = 33
"""Bytes that torchao moves to cast an element of 16 bits without compilation: absolute values and
their maximum (2 + 2 + 2), in float32 the element (2 + 4), scaled (4 + 4) and clamped (4 + 4), in 8
bits (4 + 1), and that transposed (1 + 1)."""


def cast_bytes(matmul: Matmul, share: RankShare, *, is_fused: bool = True) -> PassCosts:
    """Return the bytes moved for an 8-bit product: its input and the gradient of its output are
    read and written twice in 8 bits, plain and transposed; not `is_fused`: by torchao's single
    operations. Weights are cast once per step."""
    product = _local_product(matmul, share)
    per_element = share.element_bytes + 2 if is_fused else _UNFUSED_CAST_BYTES
    bytes_per_column = per_element * product.rows * product.times
    return PassCosts(bytes_per_column * product.in_size, bytes_per_column * product.out_size)


def attention_seconds(
    device: Device,
    attention: Attention,
    num_rows: int,
    sequence_length: int,
    *,
    num_ranks: int,
    score_passes: tuple[float, float] | None,
    speed: float = 1.0,
) -> PassCosts:
    """Return the seconds of softmax attention with heads split over `num_ranks`.

    Fused kernels compute causal scores only, and recompute them in the backward pass (2.5 times the
    forward's work: Dao 2023, arXiv 2307.08691, section 3), at `speed` relative to the device's best
    kernels. Unfused ones compute all scores and move them through memory `score_passes` times,
    forward and backward.
    """
    num_heads = attention.num_heads / num_ranks
    attended_tokens = float(sequence_length)
    if attention.window is not None:
        attended_tokens = min(attended_tokens, 2.0 * attention.window)
    num_scores = num_rows * sequence_length * attended_tokens * num_heads
    flops = 2.0 * num_scores * (attention.head_size + attention.value_size)
    peak = device.peak_flops * device.matmul_factor
    if score_passes is None:
        share = attention_shares(device, attention.head_size)
        seconds = flops / 2 / (peak * speed)
        return PassCosts(seconds / share.forward, 2.5 * seconds / share.backward)
    pass_seconds = 2.0 * num_scores / (device.memory_bandwidth * device.reach.memory)
    seconds = flops / (peak * device.reach.matmul)
    if max(attention.head_size % _ALIGNED, attention.value_size % _ALIGNED):
        seconds *= _UNALIGNED
    forward_passes, backward_passes = score_passes
    return PassCosts(
        seconds + forward_passes * pass_seconds, 2 * seconds + backward_passes * pass_seconds
    )


def attention_shares(device: Device, head_size: int) -> PassCosts:
    """Return the shares of the peak that fused attention reaches in both passes: as measured for
    the nearest head size, or else the device's."""
    measured = device.reach.attention_by_head
    if not measured:
        return PassCosts(device.reach.attention, device.reach.attention)
    _, forward, backward = min(measured, key=lambda shares: abs(shares[0] - head_size))
    return PassCosts(forward, backward)


def memory_seconds(device: Device, num_bytes: float) -> float:
    """Return the seconds to move `num_bytes` in total, read and written."""
    return num_bytes / (device.memory_bandwidth * device.reach.memory)
