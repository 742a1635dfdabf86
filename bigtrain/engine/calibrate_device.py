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

_SECONDS = 0.4  # per measurement, at least one round
_LARGE = {"cuda": 8192, "cpu": 1024}
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
    half = torch.float32 if is_cpu else torch.bfloat16
    largest = _LARGE[device.type]
    sizes = (largest // 16, largest // 4, largest)
    rates = {size: _product(device, size, half) for size in sizes}
    peak = max(rates.values())
    rate_texts = ", ".join(f"{n}: {rate / 1e12:.3g} TFLOP/s" for n, rate in rates.items())
    say(f"matrix products: {rate_texts}")
    memory = _copy(device)
    say(f"memory: {memory / 1e9:.3g} GB/s")
    attention = _attention(device, half)
    say(f"attention: {attention / peak:.2f} of the fastest product")
    # Seconds of the smallest kernel: what a launch costs.
    x = torch.zeros(8, device=device)
    kernel = 1 / _rate(device, lambda: x + 1)
    # An AdamW step in main memory reads and writes 28 bytes per parameter.
    weight = torch.nn.Parameter(torch.zeros(4 * _MIB))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    adam = _rate(torch.device("cpu"), optimizer.step) * 28 * weight.numel()
    say(f"AdamW in main memory: {adam / 1e9:.3g} GB/s on one process")
    latency, link = _link(device)
    say(f"two ranks: {link / 1e9:.3g} GB/s, {latency * 1e6:.0f} us latency")
    if device.type == "cuda":
        count = torch.cuda.device_count()
    else:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    properties = None if is_cpu else torch.cuda.get_device_properties(device)
    if properties is None:
        host_bandwidth = memory
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / count
    else:
        memory_bytes = float(properties.total_memory)
        source = torch.empty(64 * _MIB, device=device)
        target = torch.empty(64 * _MIB, pin_memory=True)
        rate = _rate(device, lambda: target.copy_(source, non_blocking=True))
        host_bandwidth = rate * source.nbytes
    # Overhead of a product, as if its inner dimension were larger by `depth`:
    # slow = fast * small / (small + depth).
    (small, slow), *_, (_, fast) = sorted(rates.items())
    depth = max(0.0, min(2000.0, small * (fast / slow - 1)))
    return Device(
        name=platform.processor() or "CPU" if properties is None else properties.name,
        peak_flops=peak,
        num_units=1 if properties is None else properties.multi_processor_count,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory,
        link_bandwidth=link,
        network_bandwidth=link,
        host_bandwidth=host_bandwidth,
        host_memory_bandwidth=adam * count,
        devices_per_node=count,
        reach=Reach(1.0, depth, attention / peak, 1.0, 1.0, 1.0, kernel, latency, 0.0, latency),
        float32_flops=peak if is_cpu else _product(device, _LARGE["cuda"] // 2, torch.float32),
        is_cpu=is_cpu,
        num_cores=count if is_cpu else 0,
    )  # fmt: skip


def _rate(device: torch.device, work: Callable[[], object]) -> float:
    """Rounds of `work` per second, after a warm-up round."""
    work()
    _wait(device)
    rounds, start = 0, time.perf_counter()
    while rounds < 3 or time.perf_counter() - start < _SECONDS:
        work()
        _wait(device)
        rounds += 1
    return rounds / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Return FLOP/s of square matrix products."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return _rate(device, lambda: a @ b) * 2 * size**3


def _copy(device: torch.device) -> float:
    source = torch.empty(64 * _MIB, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return _rate(device, lambda: target.copy_(source)) * 2 * source.nbytes


def _attention(device: torch.device, dtype: torch.dtype) -> float:
    tokens, heads, size = (4096, 16, 128) if device.type == "cuda" else (1024, 4, 64)
    q = torch.randn(1, heads, tokens, size, device=device, dtype=dtype)
    rate = _rate(device, lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    return rate * 2 * heads * tokens**2 * size  # half of the pairs, two products


def _link(device: torch.device) -> tuple[float, float]:
    """Return latency (seconds) and bandwidth (bytes per second) of an all-reduce over two ranks; on
    a single GPU, the copy bandwidth instead."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return 1e-5, _copy(device) / 2
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "link.json"
        try:
            run_local_world(2, ["-m", __name__, str(output)], {})
        except LaunchError as error:
            raise LaunchError(f"two ranks cannot reach each other: {error}") from error
        link: dict[str, Any] = json.loads(output.read_text())
    return link["start"], link["bandwidth"]


def _exchange(output: Path) -> None:
    world = read_world(os.environ)
    torch.set_num_threads(1)
    with process_group(world) as joined:
        seconds = []
        for size in (16, 16 * _MIB):
            tensor = torch.zeros(size // 4, device=joined.device)
            for _ in range(3):
                dist.all_reduce(tensor)
            _wait(joined.device)
            start, rounds = time.perf_counter(), 20
            for _ in range(rounds):
                dist.all_reduce(tensor)
            _wait(joined.device)
            seconds.append((time.perf_counter() - start) / rounds)
        if world.is_main:
            # With two ranks, a ring moves the full size once through each link.
            bandwidth = 16 * _MIB / max(seconds[1] - seconds[0], 1e-9)
            output.write_text(json.dumps({"start": seconds[0], "bandwidth": bandwidth}))


if __name__ == "__main__":
    _exchange(Path(sys.argv[1]))
