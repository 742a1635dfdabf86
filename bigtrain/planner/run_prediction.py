"""Predicted time and memory of a given run, and whether it fits its device. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import LaunchError
from bigtrain.planner.memory import MemoryUse, peak_memory
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.run_layout import layout_of
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.planner.tables.engines import engine_named
from bigtrain.planner.tables.hardware import Device
from bigtrain.settings.resolve import ResolvedRun

GIB = 2.0**30
PREDICTION = "prediction.json"
MARGIN = 0.02
"""Share of a device's memory by which a prediction may exceed it before the run is refused."""


@dataclass(frozen=True)
class RunPrediction:
    """The prediction for a run. `time` is None if its device is unknown (`device` None).

    `tokens_per_step`: of all ranks.
    """

    memory: MemoryUse
    time: StepTime | None
    device: str | None
    tokens_per_step: int

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks."""
        return None if self.time is None else self.tokens_per_step / self.time.total

    def line(self) -> str:
        """One human-readable line to print before the run."""
        terms = self.memory.terms()
        parts = ", ".join(
            f"{name} {size / GIB:.3g}" for name, size in terms.items() if size and name != "context"
        )
        rate = self.tokens_per_second
        text = f"predicted: {self.memory.allocated / GIB:.3g} GiB of tensors on the fullest rank"
        text += f" ({parts})"
        return text if rate is None else f"{text}, {rate:,.0f} tokens/s on {self.device}"

    def beside(self, tokens_per_second: float, memory_gib: float) -> list[str]:
        """A line for the end of a run: the prediction and its relative error."""
        rate = self.tokens_per_second
        if rate is None:
            return []  # on a CPU `memory_gib` is the process's memory, not that of its tensors
        peak = self.memory.allocated / GIB
        return [
            f"predicted {rate:,.0f} tokens/s ({rate / tokens_per_second - 1:+.0%}), "
            f"{peak:.2f} GiB ({peak / max(memory_gib, 1e-9) - 1:+.0%})"
        ]

    def write(self, directory: Path) -> None:
        """Write ``prediction.json``: seconds by term, GiB by term. Raises OSError."""
        terms = {name: size / GIB for name, size in self.memory.terms().items() if size}
        tree = {
            "device": self.device,
            "step_seconds": None if self.time is None else self.time.total,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_gib": self.memory.allocated / GIB,
            "terms": {} if self.time is None else self.time.terms(),
            "memory_terms": terms,
        }
        (directory / PREDICTION).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def predict_run(
    run: ResolvedRun, model: ModelCosts, loss_chunk_tokens: int | None, device: Device | None
) -> RunPrediction:
    """Predict time and memory of `run` on `device`; without a device memory only."""
    layout = layout_of(run, loss_chunk_tokens)
    engine = engine_named("deepspeed")
    memory = peak_memory(model, layout, engine)
    time = None if device is None else step_time(model, layout, device, engine)
    name = None if device is None else device.name
    return RunPrediction(memory, time, name, run.plan.tokens_per_step)


def refuse_too_large(prediction: RunPrediction, memory_bytes: float, *, refuses: bool) -> str:
    """A warning if the run cannot fit a device of `memory_bytes`, or an empty text if it can.

    Raises LaunchError instead of warning if `refuses`.
    """
    needed = prediction.memory.allocated
    if needed <= memory_bytes * (1 + MARGIN):
        return ""
    terms = prediction.memory.terms()
    largest = max(terms, key=lambda name: terms[name])
    text = (
        f"the run is predicted to hold {needed / GIB:.1f} GiB of tensors on its fullest rank, "
        f"{terms[largest] / GIB:.1f} of them {largest}, and the device has "
        f"{memory_bytes / GIB:.1f} GiB -> ask bigtrain plan for a layout that fits, or set "
        "engine.refuse_too_large=false"
    )
    if refuses:
        raise LaunchError(text)
    return text
