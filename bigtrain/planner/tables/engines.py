"""What a training program adds to a layer's computation: its own time, what it overlaps. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.planner.tables.hardware import TABLES


@dataclass(frozen=True)
class ZeroCosts:
    """Seconds that an engine takes for each byte of a rank's parameters under a ZeRO stage: of a
    micro-batch and of a step, and how much more of both with the exchange between two ranks."""

    micro_batch: float
    step: float
    micro_batch_exchange: float
    step_exchange: float


@dataclass(frozen=True)
class MeasuredEngine:
    """What ``bigtrain plan --calibrate`` found an engine to cost on a machine's CPUs, where nothing
    hides it: seconds of an operation, of a parameter's hooks under ZeRO 3, and by ZeRO stage."""

    kernel_host_seconds: float
    parameter_host_seconds: float
    zero: Mapping[int, ZeroCosts]

    def seconds(
        self, zero_stage: int, num_accumulation: int, num_ranks: int, num_bytes: float
    ) -> tuple[float, float]:
        """Of a step of ranks that hold `num_bytes` of parameters: the engine's own, and what the
        exchange between `num_ranks` adds, as a ring's bytes grow with its size."""
        costs, m, n = self.zero[zero_stage], num_accumulation, num_ranks
        own = (m * costs.micro_batch + costs.step) * num_bytes
        exchange = (m * costs.micro_batch_exchange + costs.step_exchange) * num_bytes
        return own, exchange * 2 * (n - 1) / n


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
    allocator reserves than it gives out. `float8`: of the device's gain by 8-bit products;
    `expert_exposed`, `pipeline_exposed`: share of what experts and stages exchange that nothing
    hides or spares. `is_deepspeed`: keeps what DeepSpeed 0.19.8 keeps
    (`bigtrain.planner.memory`), as bigtrain runs it. `measured`: what takes the place of the
    optimizer's and the data-parallel exchange's formulas, on CPUs.
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
    measured: MeasuredEngine | None = None
    float8: float = 1.0
    expert_exposed: float = 1.0
    pipeline_exposed: float = 1.0

    def with_measured(self, found: MeasuredEngine) -> Engine:
        """This engine on the CPUs that `found` was measured on: no driver's context, and a host
        that does the device's work too, so that their seconds add up."""
        return replace(
            self,
            context_bytes=0.0,
            kernel_host_seconds=found.kernel_host_seconds,
            parameter_host_seconds=found.parameter_host_seconds,
            launch_overlap=1.0,
            measured=found,
        )


@functools.cache
def _table() -> Mapping[str, Any]:
    tree: Mapping[str, Any] = json.loads((TABLES / "engines.json").read_text(encoding="utf-8"))
    return tree


def engine_named(name: str) -> Engine:
    """The engine of `tables/engines.json` called so; KeyError where there is none."""
    figures = {key: item for key, item in _table()[name].items() if key != "about"}
    passes = figures.pop("score_passes")
    return Engine(name=name, score_passes=passes and tuple(passes), **figures)
