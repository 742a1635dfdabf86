"""What a training program adds to a layer's computation: its own time, what it overlaps. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.planner.hardware import TABLES


@dataclass(frozen=True)
class Engine:
    """A training program, as far as it decides how long a step takes.

    `kernel_host_seconds`: for its host to launch one operation; `parameter_host_seconds`: of its
    own, for each parameter tensor and step (hooks); `launch_overlap`: exponent ``q`` of
    ``(host^q + device^q)^(1/q)``, infinite where one hides the other wholly. `moved`: of the
    bytes that unfused elementwise operations would move, those that it does. `overlap`: share of
    the computation that its collectives run beside. `score_passes`: over unfused scores, None
    where kernels are fused; `attention`: of the device's best fused kernels. `slowdown`: share of
    hidden communication that computation gets slower by. `exposed_gradients`: share of the
    gradients' sum that nothing hides; `reduces_every_micro_batch`: under ZeRO 2.
    `optimizer_bytes`: moved for each parameter by an update; `loss_bytes`: for each logit.
    `step_seconds`: of a micro-batch, beside the rest. `saved`: of the activations that the costs
    name; `logit_bytes_cut`, `logit_bytes_whole`: kept of each logit, divided by tensor parallelism
    or not. `context_bytes`, `reserved`: what the device holds beside tensors, and how much more the
    allocator reserves than it gives out. `is_deepspeed`: keeps what DeepSpeed 0.19.8 keeps
    (`bigtrain.planner.memory`), as bigtrain runs it.
    """

    name: str
    kernel_host_seconds: float
    parameter_host_seconds: float
    launch_overlap: float
    moved: float
    overlap: float
    exposed_gradients: float
    slowdown: float
    score_passes: tuple[float, float] | None
    optimizer_bytes: float
    loss_bytes: float
    step_seconds: float
    attention: float = 1.0
    reduces_every_micro_batch: bool = False
    saved: float = 1.0
    context_bytes: float = 0.0
    reserved: float = 1.0
    logit_bytes_cut: float = 10.0
    logit_bytes_whole: float = 0.0
    has_buckets: bool = True
    balances_stages: bool = False
    is_deepspeed: bool = False


@functools.cache
def _table() -> Mapping[str, Any]:
    tree: Mapping[str, Any] = json.loads((TABLES / "engines.json").read_text(encoding="utf-8"))
    return tree


def engine_named(name: str) -> Engine:
    """The engine of `tables/engines.json` called so; KeyError where there is none."""
    figures = {key: item for key, item in _table()[name].items() if key != "about"}
    passes = figures.pop("score_passes")
    return Engine(name=name, score_passes=passes and tuple(passes), **figures)
