"""What a run is predicted to take: said before it begins, and beside what it took at its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain.errors import ConfigError, LaunchError, ModelError
from bigtrain.models.layers.loss_plan import LossPlan
from bigtrain.models.traced_costs import model_costs
from bigtrain.planner.engines import engine_named
from bigtrain.planner.hardware import Device, find_device
from bigtrain.planner.memory import MemoryUse, peak_memory
from bigtrain.planner.run_layout import layout_of
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.settings.resolve import ResolvedRun

GIB = 2.0**30
PREDICTION = "prediction.json"
MARGIN = 0.02
"""Share of a device's memory that a prediction may be wrong by before a run is refused for it."""


@dataclass(frozen=True)
class RunPrediction:
    """Of a run as it stands. `time` is None where nothing is known of the device (`device` None).

    `tokens_per_step` of the whole run.
    """

    memory: MemoryUse
    time: StepTime | None
    device: str | None
    tokens_per_step: int

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole run."""
        return None if self.time is None else self.tokens_per_step / self.time.total

    def line(self) -> str:
        """For people, before the run."""
        terms = self.memory.terms()
        parts = ", ".join(
            f"{name} {size / GIB:.3g}" for name, size in terms.items() if size and name != "context"
        )
        rate = self.tokens_per_second
        text = f"predicted: {self.memory.allocated / GIB:.3g} GiB of tensors on the fullest rank"
        text += f" ({parts})"
        return text if rate is None else f"{text}, {rate:,.0f} tokens/s on {self.device}"

    def beside(self, tokens_per_second: float, memory_gib: float) -> list[str]:
        """A line for the end of a run: what was predicted, and by how much that was wrong."""
        rate = self.tokens_per_second
        if rate is None:
            return []  # main memory of a process says nothing of its tensors
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


def predict(
    run: ResolvedRun, hf_config: Any, loss: LossPlan, device: torch.device
) -> tuple[RunPrediction | None, str]:
    """What `run` will take, or why that is not known. Not collective; a second or two, once."""
    try:
        model, _ = model_costs(run.config, hf_config)
    except (ConfigError, ModelError) as error:
        return None, " ".join(str(error).split())
    layout = layout_of(run, loss.chunk_tokens if loss.kind == "chunked" else None)
    engine = engine_named("deepspeed")
    memory = peak_memory(model, layout, engine)
    known = _device(device)
    time = None if known is None else step_time(model, layout, known, engine)
    name = None if known is None else known.name
    return RunPrediction(memory, time, name, run.plan.tokens_per_step), ""


def _device(device: torch.device) -> Device | None:
    if device.type != "cuda":
        return None
    try:
        return find_device(torch.cuda.get_device_name(device))
    except ConfigError:
        return None


def refuse_too_large(prediction: RunPrediction, memory_bytes: float, *, refuses: bool) -> str:
    """What has to be said of a run that cannot fit a device of `memory_bytes`; empty where it fits.

    Raises LaunchError where `refuses`.
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
