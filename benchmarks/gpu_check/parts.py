"""The parts in their order, each with its limit on a GPU in seconds."""

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
from benchmarks.gpu_check.changes import CHANGED
from benchmarks.gpu_check.results import Function


@dataclass(frozen=True)
class Entry:
    """A part and its limit; least_seconds: with less left of the budget it is not begun."""

    name: str
    function: Function
    limit_seconds: float
    least_seconds: float = 10.0


_NUMBERS = (
    Entry("parity-fp32", parity.parity_fp32, 60),
    Entry("parity-bf16", parity.parity_bf16, 60),
    Entry("parity-fp16", parity.parity_fp16, 90),
    Entry("checkpoints", checkpoints.checkpoints, 120),
    Entry("attention", kernels.attention, 90),
    Entry("losses", kernels.losses, 60),
    Entry("float8", kernels.float8, 90),
    Entry("grouped-products", experts.grouped_products, 30),
    Entry("offload", memory.offload, 120),
    Entry("activation-offload", memory.activation_offload, 45),
    Entry("out-of-memory", diagnostics.out_of_memory, 45),
    Entry("flight-recorder", diagnostics.flight_recorder, 30),
    Entry("profiler", diagnostics.profiler, 45),
    Entry("compilation", kernels.compilation, 90),
    Entry("nvme", memory.nvme, 90),
    Entry("zeropp", memory.zeropp, 120),
)
# Of a step of 262,144 tokens 5 s, of which three or four are taken; compilation half a minute.
_LIMITS = {"1b": 75.0, "lora": 90.0, "moe": 75.0, "8b": 60.0}
_SPEED = {
    subject: tuple(
        Entry(name, function, _LIMITS[subject], 20.0)
        for name, function in speed.parts_of(subject).items()
    )
    for subject in speed.SUBJECTS
}

# Limits are for what goes wrong, and add up to more than the budget. What no time is left for is in
# the results, by name: so numbers come first whose code changed since a GPU last computed them,
# then speed, then the numbers that were shown before, and the largest model.
PARTS = (
    Entry("machine", machine.machine, 60),
    *(entry for entry in _NUMBERS if entry.name in CHANGED),
    *_SPEED["1b"],
    Entry("trace", speed.trace, 45, 20.0),
    *_SPEED["lora"],
    *_SPEED["moe"],
    *(entry for entry in _NUMBERS if entry.name not in CHANGED),
    *_SPEED["8b"],
)


def named(name: str) -> Entry:
    """Return the part of that name."""
    return next(entry for entry in PARTS if entry.name == name)
