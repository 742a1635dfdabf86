"""Seconds of recorded kernels on a device, by part of the step, and the least that each part could
take. Pure.

No rate here is fitted to the rows that `rows` compares with. Those that were measured or published
name their source; the others are stated, with their reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.gpu_roofline.kernel import PARTS, Kernel


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device. product_flops: of a product of 8192 x 8192 matrices in 16 bits;
    float32_flops: in float32. memory_bandwidth: bytes per second, read and written, of a copy.
    num_units: multiprocessors. attention: FLOPs per second of flash attention as torch's
    sdpa computes it, forward and backward, by head size; best_attention: of the best published
    kernel. launch_seconds: of the device between two kernels; host_seconds: of the
    host for an operation. network_bandwidth: bytes per second and rank; latency_seconds: of a
    collective."""

    name: str
    product_flops: float
    float32_flops: float
    memory_bandwidth: float
    num_units: int
    attention: dict[int, tuple[float, float]] = field(default_factory=dict)
    best_attention: dict[int, tuple[float, float]] = field(default_factory=dict)
    tile_depth: int = 256
    launch_seconds: float = 2e-6
    host_seconds: float = 6e-6
    network_bandwidth: float = 450e9
    latency_seconds: float = 2e-5


H100 = Rates(
    "H100",
    # docs/benchmarks.md, "On one H100".
    product_flops=731e12,
    float32_flops=51e12,
    memory_bandwidth=2.884e12,
    num_units=132,
    # At 4,096 tokens. Forward: with a causal mask, figure 5 of arXiv 2407.08608. Backward: figure 6
    # there, without a mask, times the forward's ratio with and without: 417 x 363 / 408, and so on.
    # cuDNN's, which torch takes on compute capability 9.0 with cuDNN above 9.15.
    attention={64: (363e12, 371e12), 128: (518e12, 424e12)},
    best_attention={64: (420e12, 400e12), 128: (579e12, 492e12)},  # FlashAttention-3
)
_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""Of cuBLAS's largest tile on sm_90."""
_LEAST_DEPTH = 512
"""Inner size that is still divided over multiprocessors (split-K)."""


def seconds_of(kernel: Kernel, rates: Rates) -> float:
    """Return the seconds that the device takes for `kernel`, launch included."""
    if kernel.part == "exchange":
        return _exchange_seconds(kernel, rates)
    moving = kernel.num_bytes / rates.memory_bandwidth
    computing = 0.0
    if kernel.product is not None:
        computing = _product_seconds(kernel, rates)
    elif kernel.part == "attention" and kernel.flops:
        forward, backward = rates.attention[_nearest(kernel.head_size, rates.attention)]
        computing = kernel.flops / (backward if kernel.is_backward else forward)
    elif kernel.flops:
        computing = kernel.flops / rates.product_flops
    return max(moving, computing) + rates.launch_seconds


def _nearest(head_size: int, table: dict[int, tuple[float, float]]) -> int:
    return min(table, key=lambda size: abs(size - head_size))


def _product_seconds(kernel: Kernel, rates: Rates) -> float:
    """Waves of tiles: a last, partly filled wave takes as long as a full one, and each tile costs
    `tile_depth` elements of the inner dimension for its beginning and end. The measured rate is
    that of 8192 x 8192, whose own losses are taken out first."""
    assert kernel.product is not None
    rows, depth, columns, count = kernel.product
    peak = rates.product_flops if kernel.element_bytes <= 2 else rates.float32_flops
    return (
        count
        * _tiled(rows, depth, columns, rates)
        / _tiled(8192, 8192, 8192, rates)
        * (2 * 8192**3 / peak)
    )


def _tiled(rows: int, depth: int, columns: int, rates: Rates) -> float:
    """Return the work of the busiest multiprocessor, in elements of the inner dimension; the better
    of the tile and the turned tile."""
    least = math.inf
    for tile_rows, tile_columns in ((_TILE_ROWS, _TILE_COLUMNS), (_TILE_COLUMNS, _TILE_ROWS)):
        num_tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        num_splits = max(1, min(rates.num_units // num_tiles, depth // _LEAST_DEPTH))
        num_waves = math.ceil(num_tiles / rates.num_units)
        least = min(least, num_waves * (depth / num_splits + rates.tile_depth))
    return least


def _exchange_seconds(kernel: Kernel, rates: Rates) -> float:
    """Return the seconds of a collective by a ring; with one rank NCCL copies nothing in place."""
    n = kernel.num_ranks
    if n == 1:
        return rates.launch_seconds
    passes = 2 if "allreduce" in kernel.name else 1
    sent = passes * (n - 1) / n * kernel.exchanged_bytes
    return rates.latency_seconds + sent / rates.network_bandwidth


@dataclass
class PartPrice:
    """Price of a part of a step. least_seconds: at the device's measured rates, if every product
    ran at the rate of the largest and everything else were fused as `least_bytes` says."""

    num_kernels: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    least_seconds: float = 0.0


@dataclass(frozen=True)
class Shape:
    """What the least of a step follows from: parameters, tokens of a step of this rank, micro-batch
    passes, hidden and intermediate size, layers, widths of queries and of keys, vocabulary."""

    num_parameters: int
    num_tokens: int
    num_passes: int
    hidden: int
    intermediate: int
    num_layers: int
    query_width: int
    key_width: int
    vocabulary: int


def least_bytes(shape: Shape) -> dict[str, int]:
    """Return the bytes that each part must move in 16 bits, in one kernel a pass: inputs are read
    and outputs written once, forward and backward.

    norms: two a layer, x and residual in and out, backward x, dy, residual's gradient in, dx out.
    rotary: queries and keys in and out, both passes. activations: two products in, one out;
    backward three in, two out (the product is recomputed). loss: logits are written and read once
    in 16 bits and their gradient written in their place. gradients: a 16-bit gradient is added to
    a float32 sum, or read where it is used if there is one pass. optimizer: masters and two moments
    in and out, gradient in, 16-bit parameter out: 4 x 6 + 2 + 2 = 28 bytes, and 2 for the norm.
    """
    tokens, layers = shape.num_tokens, shape.num_layers
    hidden_bytes = 2 * tokens * shape.hidden
    gradients = 0 if shape.num_passes == 1 else (2 + 8) * shape.num_parameters * shape.num_passes
    return {
        "norms": 2 * layers * (4 + 4) * hidden_bytes,
        "rotary": layers * 4 * 2 * tokens * (shape.query_width + shape.key_width),
        "activations": layers * (3 + 5) * 2 * tokens * shape.intermediate,
        "residuals": 0,
        "loss": 3 * 2 * tokens * shape.vocabulary,
        "gradients": gradients,
        "optimizer": 30 * shape.num_parameters,
    }


@dataclass(frozen=True)
class Roofline:
    """A step by part; idle_seconds: the device waits for the host."""

    parts: dict[str, PartPrice]
    idle_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(part.seconds for part in self.parts.values()) + self.idle_seconds

    @property
    def least_seconds(self) -> float:
        """Seconds of the step with each part at its least, nothing hidden behind another."""
        return sum(part.least_seconds for part in self.parts.values())


def price(kernels: Sequence[Kernel], rates: Rates, shape: Shape) -> Roofline:
    """Return the price of a step of `kernels`."""
    parts = {name: PartPrice() for name in PARTS}
    for kernel in kernels:
        part = parts[kernel.part]
        part.num_kernels += 1
        part.num_bytes += kernel.num_bytes
        part.seconds += seconds_of(kernel, rates)
    for name, num_bytes in least_bytes(shape).items():
        parts[name].least_seconds = num_bytes / rates.memory_bandwidth
    parts["products"].least_seconds = _flops(kernels, "products") / rates.product_flops
    best = replace(rates, attention=rates.best_attention)
    parts["attention"].least_seconds = sum(
        seconds_of(k, best) for k in kernels if k.part == "attention" and k.flops
    )
    parts["exchange"].least_seconds = sum(
        seconds_of(k, rates) for k in kernels if k.part == "exchange" and k.num_ranks > 1
    )
    device_seconds = sum(part.seconds for part in parts.values())
    host_seconds = rates.host_seconds * len(kernels)
    return Roofline(parts, max(0.0, host_seconds - device_seconds))


def _flops(kernels: Iterable[Kernel], part: str) -> int:
    return sum(kernel.flops for kernel in kernels if kernel.part == part)
