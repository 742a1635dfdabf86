"""Seconds of recorded kernels on a device, by part of the step, and the least that each part could
take. Pure.

Products, copies, attention and collectives have the planner's prices, with the rates that were
measured on a device (`measured` in bigtrain/planner/tables/hardware.json, with their sources). None
is fitted to the rows that `rows` compares with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu_roofline.kernel import PARTS, Kernel
from bigtrain.planner.seconds.communication import Group
from bigtrain.planner.seconds.kernels import attention_shares, matmul_seconds, memory_seconds
from bigtrain.planner.tables.engines import engine_named
from bigtrain.planner.tables.hardware import Device, find_device


def priced_device(name: str) -> Device:
    """Return the device called `name` ("B200") as the planner prices with it: with the rates that
    were measured on one, or else those that are fitted to published rows."""
    device = find_device(name)
    return replace(device, reach=device.measured_reach or device.reach)


H100 = priced_device("H100-80GB")
TILE_ROWS = 128
"""Rows of a tile of a grouped product: half of the largest tile's, which experts with few tokens
leave unfilled."""
HOST_SECONDS = engine_named("deepspeed").kernel_host_seconds
"""Of the host, to launch a kernel."""


def seconds_of(kernel: Kernel, device: Device, *, is_best: bool = False) -> float:
    """Return the seconds that `device` takes for `kernel`, launch included. is_best: attention by
    the best published kernel instead of torch's."""
    if kernel.part == "exchange":
        return _exchange_seconds(kernel, device)
    moving = memory_seconds(device, kernel.num_bytes)
    computing = 0.0
    if kernel.product is not None:
        rows, depth, columns, count = kernel.product
        if kernel.part == "experts":
            # One kernel whose waves take tiles of all experts, each of which ends with its own.
            rows, count = count * math.ceil(rows / TILE_ROWS) * TILE_ROWS, 1
        gain = device.float8_gain if kernel.element_bytes == 1 else 1.0
        one = matmul_seconds(device, rows, depth, columns, kernel.element_bytes, gain=gain)
        computing = count * (one - device.reach.kernel_seconds)
    elif kernel.part == "attention" and kernel.flops:
        best = replace(device.reach, attention_by_head=device.reach.best_attention_by_head)
        shares = attention_shares(
            replace(device, reach=best) if is_best else device, kernel.head_size
        )
        share = shares.backward if kernel.is_backward else shares.forward
        computing = kernel.flops / (device.peak_flops * share)
    elif kernel.flops:
        computing = kernel.flops / product_flops(device)
    return max(moving, computing) + device.reach.kernel_seconds


def product_flops(device: Device) -> float:
    """Return the FLOPs per second of the largest product that was measured, of 8192 x 8192 in 16
    bits."""
    return 2 * 8192**3 / matmul_seconds(device, 8192, 8192, 8192, 2)


def _exchange_seconds(kernel: Kernel, device: Device) -> float:
    """Return the seconds of a collective by a ring; with one rank NCCL copies nothing in place."""
    if kernel.num_ranks == 1:
        return device.reach.kernel_seconds
    group = Group(kernel.num_ranks, min(kernel.num_ranks, device.devices_per_node))
    if "allreduce" in kernel.name:
        return group.all_reduce(device, kernel.exchanged_bytes)
    return group.all_gather(device, kernel.exchanged_bytes)


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


def price(kernels: Sequence[Kernel], device: Device, shape: Shape) -> Roofline:
    """Return the price of a step of `kernels`."""
    parts = {name: PartPrice() for name in PARTS}
    for kernel in kernels:
        part = parts[kernel.part]
        part.num_kernels += 1
        part.num_bytes += kernel.num_bytes
        part.seconds += seconds_of(kernel, device)
    for name, num_bytes in least_bytes(shape).items():
        parts[name].least_seconds = memory_seconds(device, num_bytes)
    for name in ("products", "experts"):
        parts[name].least_seconds = _least_product_seconds(kernels, name, device)
    parts["attention"].least_seconds = sum(
        seconds_of(k, device, is_best=True) for k in kernels if k.part == "attention" and k.flops
    )
    parts["exchange"].least_seconds = sum(
        seconds_of(k, device) for k in kernels if k.part == "exchange" and k.num_ranks > 1
    )
    device_seconds = sum(part.seconds for part in parts.values())
    host_seconds = HOST_SECONDS * len(kernels)
    return Roofline(parts, max(0.0, host_seconds - device_seconds))


def _least_product_seconds(kernels: Iterable[Kernel], part: str, device: Device) -> float:
    flops = sum(
        kernel.flops / (device.float8_gain if kernel.element_bytes == 1 else 1.0)
        for kernel in kernels if kernel.part == part
    )  # fmt: skip
    return flops / product_flops(device)
