"""The parts, the most valuable first, each with its limit on a GPU in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_check import (
    checkpoints,
    diagnostics,
    experts,
    kernels,
    machine,
    memory,
    parity,
    speed,
)
from benchmarks.gpu_check.results import Function


@dataclass(frozen=True)
class Entry:
    """A part and its limit; least_seconds: with less left of the budget it is not begun."""

    name: str
    function: Function
    limit_seconds: float
    least_seconds: float = 10.0


# Limits are for what goes wrong, and add up to more than the budget; all parts together fit into
# ten minutes where nothing does. What no time is left for is in the results, by name: so numbers
# come first, then a resume, the speed of the usual size, kernels, the largest size, and what is
# rarer.
PARTS = (
    Entry("machine", machine.machine, 60),
    Entry("parity-fp32", parity.parity_fp32, 60),
    Entry("parity-bf16", parity.parity_bf16, 60),
    Entry("parity-fp16", parity.parity_fp16, 90),
    Entry("checkpoints", checkpoints.checkpoints, 120),
    Entry("speed-1b", speed.speed_1b, 180, 30),
    Entry("attention", kernels.attention, 90),
    Entry("losses", kernels.losses, 60),
    Entry("float8", kernels.float8, 90),
    Entry("grouped-products", experts.grouped_products, 30),
    Entry("speed-8b", speed.speed_8b, 150, 45),
    Entry("offload", memory.offload, 120),
    Entry("activation-offload", memory.activation_offload, 45),
    Entry("out-of-memory", diagnostics.out_of_memory, 45),
    Entry("flight-recorder", diagnostics.flight_recorder, 30),
    Entry("profiler", diagnostics.profiler, 45),
    Entry("compilation", kernels.compilation, 90),
    Entry("speed-3b", speed.speed_3b, 90, 30),
    Entry("nvme", memory.nvme, 90),
    Entry("zeropp", memory.zeropp, 120),
)


def named(name: str) -> Entry:
    """Return the part of that name."""
    return next(entry for entry in PARTS if entry.name == name)
