"""Seconds of the operations of a layer on one device. Pure.

Matrix products are counted in tiles: a device computes as many at once as it has multiprocessors,
and a last, partly filled wave takes as long as a full one ("wave quantization", NVIDIA's guide to
matrix multiplication performance). Small products are bound by memory instead.
"""

from __future__ import annotations

import functools
import math

from bigtrain.planner.model_costs import Attention, Matmul
from bigtrain.planner.tables.hardware import Device

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.7))
"""Rows, columns, and speed relative to the best tile (smaller tiles reuse loaded data less)."""


_ALIGNED = 8  # 16-bit elements: 16 bytes, the load size of tensor-core kernels
_UNALIGNED = 22.0
"""Slowdown of products of unaligned heads, which such kernels do not support: 10 of A100's 312
TFLOP/s by BigScience's two models with heads of 108 and 150 (train/tr11-176B-ml/
chronicles-prequel.md), which are 36% and 30% slower because of a tenth of their products."""
_LEAST_DEPTH = 512  # smallest inner dimension that is still split


@functools.lru_cache(maxsize=1 << 16)
def matmul_seconds(
    device: Device, rows: int, in_size: int, out_size: int, element_bytes: int, gain: float = 1.0
) -> float:
    """Return the seconds of ``rows x in_size`` times ``in_size x out_size``; `gain`: speed-up of a
    faster number format."""
    if min(rows, in_size, out_size) <= 0:
        return 0.0
    size = rows * in_size + in_size * out_size + rows * out_size
    moved = element_bytes * size / (device.memory_bandwidth * device.reach.memory)
    peak = device.peak_flops if element_bytes <= 2 else device.float32_flops or device.peak_flops
    peak *= device.matmul_factor * device.reach.matmul * gain
    if device.is_cpu:
        return max(2.0 * rows * in_size * out_size / peak, moved) + device.reach.kernel_seconds
    best = math.inf
    for tile_rows, tile_columns, speed in _TILES:
        tiles = math.ceil(rows / tile_rows) * math.ceil(out_size / tile_columns)
        waves = math.ceil(tiles / device.num_units)
        # If tiles are few, several multiprocessors share the inner dimension of one (split-K).
        depth = in_size / max(1, min(device.num_units // tiles, in_size // _LEAST_DEPTH))
        work = 2.0 * tile_rows * tile_columns * (depth + device.reach.matmul_depth)
        best = min(best, waves * work * device.num_units / (peak * speed))
    return max(best, moved) + device.reach.kernel_seconds


def weight_seconds(
    device: Device,
    matmul: Matmul,
    tokens: int,
    tensor_size: int,
    expert_size: int,
    element_bytes: int,
    gain: float,
) -> tuple[float, float]:
    """Return the forward and backward seconds of a product with a rank's shard of a weight.

    With expert parallelism a rank receives all tokens of its `expert_size` group for its experts:
    as many tokens as without it, for fewer experts. Tensor parallelism does not shard experts then;
    each of its ranks sends a slice of the tokens.
    """
    in_size, out_size, rows, times = _part(matmul, tokens, tensor_size, expert_size)
    forward = matmul_seconds(device, rows, in_size, out_size, element_bytes, gain)
    inputs = matmul_seconds(device, rows, out_size, in_size, element_bytes, gain)
    weights = matmul_seconds(device, in_size, rows, out_size, element_bytes, gain)
    return times * forward, times * (inputs + weights)


def _part(
    matmul: Matmul, tokens: int, tensor_size: int, expert_size: int
) -> tuple[int, int, int, float]:
    """Return, for a rank: the weight's dimensions, the rows it is multiplied with, and the
    repetitions."""
    if matmul.num_groups > 1 and expert_size > 1:
        tokens, tensor_size = max(1, tokens // tensor_size), 1
    in_size = matmul.in_size // (tensor_size if matmul.cut == "in" else 1)
    out_size = matmul.out_size // (tensor_size if matmul.cut == "out" else 1)
    if matmul.num_groups == 1 and matmul.share == 1.0:
        return in_size, out_size, tokens, float(matmul.count)
    # Experts: assumes perfect load balance.
    own = max(1, matmul.num_groups // expert_size)
    rows = max(1, round(tokens * matmul.share / own))
    return in_size, out_size, rows, float(own * matmul.count)


def cast_bytes(
    matmul: Matmul, tokens: int, tensor_size: int, expert_size: int, element_bytes: int
) -> tuple[float, float]:
    """Return the bytes moved for an 8-bit product, forward and backward: its input and the gradient
    of its output are read and written twice in 8 bits, plain and transposed. Weights are cast once
    per step."""
    in_size, out_size, rows, times = _part(matmul, tokens, tensor_size, expert_size)
    each = (element_bytes + 2) * rows * times
    return each * in_size, each * out_size


def attention_seconds(
    device: Device,
    attention: Attention,
    samples: int,
    sequence_length: int,
    num_ranks: int,
    score_passes: tuple[float, float] | None,
    speed: float = 1.0,
) -> tuple[float, float]:
    """Return the forward and backward seconds of softmax attention with heads split over
    `num_ranks`.

    Fused kernels compute causal scores only, and recompute them in the backward pass (2.5 times the
    forward's work: Dao 2023, arXiv 2307.08691, section 3), at `speed` relative to the device's best
    kernels. Unfused ones compute all scores and move them through memory `score_passes` times,
    forward and backward.
    """
    heads = attention.num_heads / num_ranks
    looked_at = float(sequence_length)
    if attention.window is not None:
        looked_at = min(looked_at, 2.0 * attention.window)
    pairs = samples * sequence_length * looked_at * heads
    flops = 2.0 * pairs * (attention.head_size + attention.value_size)
    if score_passes is None:
        seconds = flops / 2 / (_peak(device) * device.reach.attention * speed)
        return seconds, 2.5 * seconds
    moved = 2.0 * pairs / (device.memory_bandwidth * device.reach.memory)
    seconds = flops / (_peak(device) * device.reach.matmul)
    if max(attention.head_size % _ALIGNED, attention.value_size % _ALIGNED):
        seconds *= _UNALIGNED
    forward, backward = score_passes
    return seconds + forward * moved, 2 * seconds + backward * moved


def _peak(device: Device) -> float:
    return device.peak_flops * device.matmul_factor


def memory_seconds(device: Device, num_bytes: float) -> float:
    """Return the seconds to move `num_bytes` in total, read and written."""
    return num_bytes / (device.memory_bandwidth * device.reach.memory)
