"""Speed of this machine's device, measured in about a minute for the planner.

The peaks of the resulting `bigtrain.planner.tables.hardware.Device` are the best rates measured.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from bigtrain.engine.startup.process_group import process_group
from bigtrain.errors import LaunchError
from bigtrain.planner.tables.hardware import Device, Reach
from bigtrain.system.local_world import run_local_world
from bigtrain.system.world import read_world

_SECONDS = 0.4  # of a measurement, which has at least 3 rounds
_LARGEST_SIZE = {"cuda": 8192, "cpu": 1024}  # rows and columns of the largest matrix
_MIB = 2**20


def calibrate(say: Callable[[str], None]) -> Device:
    """Measure this machine's first device, or one rank on its CPUs. Not collective."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type)
    threads = torch.get_num_threads()
    if device_type == "cpu":
        torch.set_num_threads(1)  # as a rank of a world that fills the cores has
    try:
        return _measure(device, say)
    finally:
        torch.set_num_threads(threads)


def _measure(device: torch.device, say: Callable[[str], None]) -> Device:
    is_cpu = device.type == "cpu"
    # Matrix products: the largest has the peak rate, smaller ones show the overhead.
    dtype = torch.float32 if is_cpu else torch.bfloat16
    largest = _LARGEST_SIZE[device.type]
    sizes = (largest // 16, largest // 4, largest)
    flops_by_size = {size: _product_flops(device, size, dtype) for size in sizes}
    peak_flops = max(flops_by_size.values())
    texts = [f"{size}: {flops / 1e12:.3g} TFLOP/s" for size, flops in flops_by_size.items()]
    say(f"matrix products: {', '.join(texts)}")
    bandwidth = _copy_bandwidth(device)
    say(f"memory: {bandwidth / 1e9:.3g} GB/s")
    attention_share = _attention_flops(device, dtype) / peak_flops
    say(f"attention: {attention_share:.2f} of the fastest product")
    # Seconds of the smallest kernel: the cost of a launch.
    x = torch.zeros(8, device=device)
    kernel_seconds = 1 / _rounds_per_second(device, lambda: x + 1)
    # AdamW in main memory: a step reads and writes 28 bytes per parameter.
    weight = torch.nn.Parameter(torch.zeros(4 * _MIB))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    steps_per_second = _rounds_per_second(torch.device("cpu"), optimizer.step)
    adam_bandwidth = steps_per_second * 28 * weight.numel()
    say(f"AdamW in main memory: {adam_bandwidth / 1e9:.3g} GB/s on one process")
    latency, link_bandwidth = _link_latency_and_bandwidth(device)
    say(f"two ranks: {link_bandwidth / 1e9:.3g} GB/s, {latency * 1e6:.0f} us latency")
    # A device is a GPU, or a core with its part of the memory.
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
    else:
        num_devices = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    properties = None if is_cpu else torch.cuda.get_device_properties(device)
    if properties is None:
        host_bandwidth = bandwidth
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_devices
    else:
        memory_bytes = float(properties.total_memory)
        source = torch.empty(64 * _MIB, device=device)
        target = torch.empty(64 * _MIB, pin_memory=True)
        copies = _rounds_per_second(device, lambda: target.copy_(source, non_blocking=True))
        host_bandwidth = copies * source.nbytes
    # Overhead of a product, as if its inner dimension were larger by `depth`:
    # small_flops = large_flops * small / (small + depth).
    (small, small_flops), *_, (_, large_flops) = sorted(flops_by_size.items())
    depth = max(0.0, min(2000.0, small * (large_flops / small_flops - 1)))
    float32_flops = peak_flops
    if not is_cpu:
        float32_flops = _product_flops(device, _LARGEST_SIZE["cuda"] // 2, torch.float32)
    return Device(
        name=(platform.processor() or "CPU") if properties is None else properties.name,
        peak_flops=peak_flops,
        num_units=1 if properties is None else properties.multi_processor_count,
        memory_bytes=memory_bytes,
        memory_bandwidth=bandwidth,
        link_bandwidth=link_bandwidth,
        network_bandwidth=link_bandwidth,
        host_bandwidth=host_bandwidth,
        host_memory_bandwidth=adam_bandwidth * num_devices,
        devices_per_node=num_devices,
        reach=Reach(
            1.0, depth, attention_share, 1.0, 1.0, 1.0, kernel_seconds, latency, 0.0, latency
        ),
        float32_flops=float32_flops,
        is_cpu=is_cpu,
        num_cores=num_devices if is_cpu else 0,
    )


def _rounds_per_second(device: torch.device, work: Callable[[], object]) -> float:
    """Return the rounds of `work` per second, after a warm-up round."""
    work()
    _wait(device)
    num_rounds, start = 0, time.perf_counter()
    while num_rounds < 3 or time.perf_counter() - start < _SECONDS:
        work()
        _wait(device)
        num_rounds += 1
    return num_rounds / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product_flops(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Return FLOP/s of square matrix products."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return _rounds_per_second(device, lambda: a @ b) * 2 * size**3


def _copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that copies in the device's memory read and write."""
    source = torch.empty(64 * _MIB, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return _rounds_per_second(device, lambda: target.copy_(source)) * 2 * source.nbytes


def _attention_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of causal attention."""
    num_tokens, num_heads, head_size = (4096, 16, 128) if device.type == "cuda" else (1024, 4, 64)
    q = torch.randn(1, num_heads, num_tokens, head_size, device=device, dtype=dtype)
    passes_per_second = _rounds_per_second(
        device, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)
    )
    # Two products of 2 FLOPs per element, for half of the pairs of tokens.
    return passes_per_second * 2 * num_heads * num_tokens**2 * head_size


def _link_latency_and_bandwidth(device: torch.device) -> tuple[float, float]:
    """Return latency (seconds) and bandwidth (bytes per second) of an all-reduce over two ranks; on
    a single GPU, the copy bandwidth instead."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return 1e-5, _copy_bandwidth(device) / 2
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "link.json"
        try:
            run_local_world(2, ["-m", __name__, str(output)], {})
        except LaunchError as error:
            raise LaunchError(f"two ranks cannot reach each other: {error}") from error
        link: dict[str, Any] = json.loads(output.read_text())
    return link["start"], link["bandwidth"]


def _exchange(output: Path) -> None:
    """Time all-reduces on one of two ranks, and write latency and bandwidth. Collective."""
    world = read_world(os.environ)
    torch.set_num_threads(1)
    with process_group(world) as joined:
        seconds = []
        for num_bytes in (16, 16 * _MIB):
            tensor = torch.zeros(num_bytes // 4, device=joined.device)
            for _ in range(3):
                dist.all_reduce(tensor)
            _wait(joined.device)
            start, num_rounds = time.perf_counter(), 20
            for _ in range(num_rounds):
                dist.all_reduce(tensor)
            _wait(joined.device)
            seconds.append((time.perf_counter() - start) / num_rounds)
        if world.is_main:
            # With two ranks, a ring moves the full size once through each link.
            small_seconds, large_seconds = seconds
            bandwidth = 16 * _MIB / max(large_seconds - small_seconds, 1e-9)
            output.write_text(json.dumps({"start": small_seconds, "bandwidth": bandwidth}))


if __name__ == "__main__":
    _exchange(Path(sys.argv[1]))
