"""Forward and backward passes, measured in processes of their own, since peaks do not go down."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch

from bigtrain.run.reporting.metrics import memory_gib

Figures = dict[str, float]


def measure_passes(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], device: torch.device, rounds: int
) -> Figures:
    """Peak GiB above what is held now, and median seconds of a forward and backward pass, of the
    clock and of the processor."""
    before = memory_gib(device.type)
    seconds, cpu_seconds = [], []
    for _ in range(rounds):
        model.zero_grad()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        loss_of().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        cpu_seconds.append(time.process_time() - cpu_begun)
    return {
        "peak_gib": memory_gib(device.type) - before,
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
    }


def each_alone(contenders: Sequence[str]) -> dict[str, Figures]:
    """Run this script with ``--only CONTENDER`` for each and return the JSON that it prints
    last."""
    figures_by_name = {}
    for contender in contenders:
        command = [sys.executable, *sys.argv, "--only", contender]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            sys.exit(f"{finished.stdout}{finished.stderr}\n{contender} failed")
        figures_by_name[contender] = json.loads(finished.stdout.splitlines()[-1])
    return figures_by_name


def print_table(figures_by_name: dict[str, Figures]) -> None:
    """Print a line for each contender."""
    for name, row in figures_by_name.items():
        times = f"{row['seconds']:.3f} s, of the processor {row['cpu_seconds']:.3f} s"
        print(f"{name:<10} peak {row['peak_gib']:.2f} GiB, {times}")


def ratio(figures: Figures, limit: Figures) -> Figures:
    """Return the ratio of `figures` to `limit` for every measure."""
    return {key: figures[key] / limit[key] for key in ("peak_gib", "seconds", "cpu_seconds")}
