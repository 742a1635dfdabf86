"""Training engines (DeepSpeed, Megatron, FSDP, ...): their overheads, overlap and memory. Pure.

Also the file of ``bigtrain plan --calibrate`` for ``--hardware``, and its copy in the user's cache,
from which runs on this machine's CPUs are predicted.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bigtrain.errors import ConfigError, Problem
from bigtrain.planner.tables.hardware import TABLES, Device
from bigtrain.system.user_cache import cache_get, cache_put, key_of, package_fingerprints, processor


@dataclass(frozen=True)
class ZeroCosts:
    """Seconds of an engine per byte of a rank's parameters under a ZeRO stage: per micro-batch and
    per step, and the additions by communication between two ranks."""

    micro_batch: float
    step: float
    micro_batch_exchange: float
    step_exchange: float


@dataclass(frozen=True)
class MeasuredEngine:
    """Engine overhead as ``bigtrain plan --calibrate`` measured it on a machine's CPUs, where
    nothing hides it: seconds per operation, per parameter's hooks (ZeRO 3), and by ZeRO stage."""

    kernel_host_seconds: float
    parameter_host_seconds: float
    zero: Mapping[int, ZeroCosts]

    def seconds(
        self, zero_stage: int, num_accumulation: int, num_ranks: int, num_bytes: float
    ) -> tuple[float, float]:
        """Return the seconds of a step with `num_bytes` of parameters per rank: of the engine, and
        of communication among `num_ranks`, scaled like the bytes of a ring."""
        costs, m, n = self.zero[zero_stage], num_accumulation, num_ranks
        engine_seconds = (m * costs.micro_batch + costs.step) * num_bytes
        exchange = (m * costs.micro_batch_exchange + costs.step_exchange) * num_bytes
        return engine_seconds, exchange * 2 * (n - 1) / n


@dataclass(frozen=True)
class Engine:
    """Training engine: its effects on time and memory of a step.

    Time: `kernel_host_seconds`: to launch one operation; `parameter_host_seconds`: overhead per
    parameter tensor and step (hooks); `launch_overlap`: exponent ``q`` of
    ``(host^q + device^q)^(1/q)``, infinite if the longer hides the shorter completely. `moved`:
    share of the bytes of unfused elementwise operations that it moves. `overlap`: share of the
    computation with which its collectives overlap. `score_passes`: passes over unfused attention
    scores, None for fused kernels; `attention`: speed relative to the device's best fused kernels.
    `slowdown`: share of hidden communication by which computation gets slower.
    `exposed_gradients`: share of the gradient reduction that is never hidden;
    `reduces_every_micro_batch`: under ZeRO 2. `optimizer_bytes`: moved per parameter by an update;
    `loss_bytes`: per logit. `step_seconds`: fixed overhead per micro-batch. `measured`: on CPUs,
    replaces the formulas of the optimizer and of data-parallel communication. `float8`: factor on
    the device's gain from 8-bit products; `products`: speed of its products relative to the
    engines whose rows the device's share of the peak was fitted to (libraries grew faster);
    `tensor_exposed`, `expert_exposed`, `pipeline_exposed`: share of the communication of tensor
    parallelism, experts and stages that is neither hidden nor avoided; `network`: share of the
    bandwidth between nodes that its all-gathers of parameters reach, 0 for the device's
    `reach`. `expert_host_seconds`: of a forward pass, for each of a rank's experts in a layer,
    if each has its own kernels (casts, products).

    Memory: `saved`: factor on the saved activations; `logit_bytes_cut`, `logit_bytes_whole`: kept
    per logit, divided by tensor parallelism or not; `compiled_logit_bytes`: by a release that
    compiles its loss, 0 if none does. `context_bytes`: used on the device in addition to
    tensors; `reserved`: memory reserved by the allocator over memory allocated. `is_deepspeed`:
    keeps what DeepSpeed 0.19.8 keeps (`bigtrain.planner.memory`), as bigtrain runs it.
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
    compiled_logit_bytes: float = 0.0
    has_buckets: bool = True
    balances_stages: bool = False
    is_deepspeed: bool = False
    measured: MeasuredEngine | None = None
    float8: float = 1.0
    tensor_exposed: float = 1.0
    expert_exposed: float = 1.0
    pipeline_exposed: float = 1.0
    products: float = 1.0
    network: float = 0.0
    expert_host_seconds: float = 0.0

    def with_measured(self, measured: MeasuredEngine) -> Engine:
        """Return this engine on the CPUs that it was `measured` on: without a CUDA context, and
        with host and device time added up, since the CPU does both."""
        return replace(
            self,
            context_bytes=0.0,
            kernel_host_seconds=measured.kernel_host_seconds,
            parameter_host_seconds=measured.parameter_host_seconds,
            launch_overlap=1.0,
            measured=measured,
        )


@functools.cache
def _table() -> Mapping[str, Any]:
    tree: Mapping[str, Any] = json.loads((TABLES / "engines.json").read_text(encoding="utf-8"))
    return tree


def cpu_engine() -> MeasuredEngine:
    """Return DeepSpeed's costs on the CPUs that the shipped tables were measured on."""
    tree = {key: item for key, item in _table()["cpu"].items() if key != "about"}
    return TypeAdapter(MeasuredEngine).validate_python(tree)


def engine_named(name: str) -> Engine:
    """Return the engine `name` of `tables/engines.json`. Raises KeyError if there is none."""
    figures = {key: item for key, item in _table()[name].items() if key != "about"}
    passes = figures.pop("score_passes")
    return Engine(name=name, score_passes=passes and tuple(passes), **figures)


KIND = "calibration"
_NOT_ONE = (OSError, ValueError)


def write_calibration(device: Device, engine: MeasuredEngine | None, path: Path) -> None:
    """Write the measurements of `device` and, on CPUs, of the engine. Raises OSError."""
    path.write_text(
        json.dumps(asdict(_Calibration(device, engine)), indent=1) + "\n", encoding="utf-8"
    )


def load_calibration(path: Path) -> tuple[Device, MeasuredEngine | None]:
    """Read a file of `write_calibration`. Raises ConfigError."""
    fix = "write one with bigtrain plan --calibrate"
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        rule = f"is not a calibration: {key}: {first['msg']}"
        if not key:
            rule = "is not a calibration: must hold device and engine"
        raise ConfigError(Problem("--hardware", str(path), rule, fix)) from error
    except OSError as error:
        rule = "no such file" if not path.exists() else f"cannot be read: {error.strerror}"
        raise ConfigError(Problem("--hardware", str(path), rule, fix)) from error
    except ValueError as error:
        rule = f"is not a calibration: {error}"
        raise ConfigError(Problem("--hardware", str(path), rule, fix)) from error


def keep_calibration(device: Device, engine: MeasuredEngine | None) -> None:
    """Store the measurements of this machine's CPUs in the user's cache."""
    cache_put(KIND, _machine(), asdict(_Calibration(device, engine)))


def kept_calibration() -> tuple[Device, MeasuredEngine | None] | None:
    """Return the last measurements of this machine's CPUs; None if there are none."""
    tree = cache_get(KIND, _machine())
    if tree is not None:
        with suppress(*_NOT_ONE):
            return _read(tree)
    return None


def _machine() -> str:
    """Return the key of what a measurement depends on: the machine, and the libraries on it."""
    libraries = "editable"
    with suppress(LookupError):
        libraries = package_fingerprints("torch", "deepspeed")
    return key_of([platform.node(), processor(), str(os.cpu_count()), libraries])


@dataclass(frozen=True)
class _Calibration:
    device: Device
    engine: MeasuredEngine | None


def _read(tree: Any) -> tuple[Device, MeasuredEngine | None]:
    """Raise ValueError if it is invalid."""
    calibration = TypeAdapter(_Calibration).validate_python(tree)
    return calibration.device, calibration.engine
