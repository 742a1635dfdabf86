"""Machine: installed versions, and the rates with which other results are compared."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu_check.results import Part, Setup
from benchmarks.gpu_check.training import Case, alone, run_of
from bigtrain.system.machine import this_machine

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "tokenizers", "accelerate", "pydantic")


def machine(setup: Setup, part: Part) -> None:
    """Versions, memory and rates; that the settings of a run took hold on this device."""
    part.figures |= describe()
    with alone(setup, run_of(setup, Case("machine"))) as device:
        if setup.on_gpu:
            _check_settings(part, device)
        else:
            part.note("expandable_segments", "needs CUDA")
        part.figures |= rates(setup)


def _check_settings(part: Part, device: torch.device) -> None:
    """Check the settings before anything else allocates memory."""
    held = torch.ones(64 << 20, device=device)
    segments = [s for s in torch.cuda.memory_snapshot() if s["total_size"] >= held.nbytes]
    expandable = bool(segments) and all(s.get("is_expandable") for s in segments)
    part.figures["expandable_segments"] = expandable
    part.check(expandable, "the allocator has no expandable segments")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        part.check(name in os.environ, f"{name} is not set")
    precision = torch.get_float32_matmul_precision()
    part.check(precision == "highest", "float32 products are in TF32")


def describe() -> dict[str, Any]:
    """Versions and sizes, without touching the GPU's memory."""
    this = this_machine({})
    description: dict[str, Any] = {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cores": this.num_cores,
        "host_gib": this.memory_bytes / 2**30,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        description |= {"gpu": properties.name, "gpu_gib": properties.total_memory / 2**30}
        description["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return description


def rates(setup: Setup) -> dict[str, float]:
    """Products in TFLOP/s; copies on the device (read and written) and from the host, in GB/s."""
    width, copied = (64, 1 << 20) if setup.tiny else (8192, 4 << 30)
    device = torch.device(setup.device)
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    full = torch.randn(width, width, device=device)
    source = torch.randint(0, 255, (copied,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    part = min(copied, 1 << 30)
    host = torch.empty(part, dtype=torch.uint8)
    measured = {
        "bf16_tflops": 2 * width**3 / seconds_of(setup, lambda: a @ b) / 1e12,
        "fp32_tflops": 2 * width**3 / seconds_of(setup, lambda: full @ full) / 1e12,
        "device_copy_gbs": 2 * copied / seconds_of(setup, lambda: target.copy_(source)) / 1e9,
        "host_copy_gbs": part / seconds_of(setup, lambda: target[:part].copy_(host)) / 1e9,
    }
    if setup.on_gpu:
        pinned = torch.empty(part, dtype=torch.uint8, pin_memory=True)
        seconds = seconds_of(setup, lambda: target[:part].copy_(pinned, non_blocking=True))
        measured["pinned_copy_gbs"] = part / seconds / 1e9
    return measured


def seconds_of(setup: Setup, call: Callable[[], object], repeats: int = 10) -> float:
    """Return the seconds of one call: the median of `repeats` timed ones, after three that warm
    up."""
    taken = []
    for number in range(3 + repeats):
        if setup.on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if setup.on_gpu:
            torch.cuda.synchronize()
        if number >= 3:
            taken.append(time.perf_counter() - begun)
    return sorted(taken)[repeats // 2]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
