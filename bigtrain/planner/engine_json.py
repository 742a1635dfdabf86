"""The DeepSpeed JSON of a layout, and the fields of a layout that follow from others. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.engine_config import (
    find_deepspeed_config,
    gradient_dtype_of,
    label_of,
    read_deepspeed_config,
    render,
)
from bigtrain.settings.deepspeed.keys import AUTO
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.units import DTYPE_BYTES

if TYPE_CHECKING:
    from bigtrain.planner.legal_layouts import DerivedFields

BATCH_KEYS = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "num_accumulation",
}
"""Numbers of a JSON that a run's batch has to agree with, and the fields of a `Layout`."""


def shipped_name(zero_stage: int, *, offloads_optimizer: bool) -> str:
    """Return the name in ``ds_configs/`` of the JSON that a plan starts from. None is shipped for
    ZeRO 1 with an offloaded optimizer: it is ZeRO 2's with another stage."""
    if not offloads_optimizer:
        return f"zero{zero_stage}"
    return f"zero{max(2, zero_stage)}_offload"


def shipped_engine(
    zero_stage: int, *, offloads_optimizer: bool = False, offloads_parameters: bool = False
) -> dict[str, Any]:
    """Return the DeepSpeed JSON that a plan writes for a layout, but for the sizes of buckets."""
    name = shipped_name(zero_stage, offloads_optimizer=offloads_optimizer)
    raw = read_deepspeed_config(find_deepspeed_config(name))
    raw["zero_optimization"]["stage"] = zero_stage
    if offloads_optimizer and not offloads_parameters:
        raw["zero_optimization"].pop("offload_param", None)
    return raw


def named_engine(config: RunConfig) -> dict[str, Any]:
    """Return the DeepSpeed JSON that `config` names. Raises ConfigError with the problems that
    `bigtrain check` finds in any layout."""
    path = find_deepspeed_config(config.engine.deepspeed_config)
    raw, label = read_deepspeed_config(path), label_of(path)
    _, problems = render(config, None, raw, label)
    if problems:
        raise ConfigError(problems, f"the run with {label}")
    return raw


def fields_of_batch(
    raw: Mapping[str, Any], config: RunConfig, holds_micro_batch: bool
) -> dict[str, int]:
    """Return the fields of a `Layout` that the batch in a checked JSON holds. holds_micro_batch:
    so does ``batch.micro_batch_size`` of `config`. Raises ConfigError where they contradict each
    other."""
    batch, label = config.batch, label_of(find_deepspeed_config(config.engine.deepspeed_config))
    owned = [(_BATCH, "the samples of a step", batch.samples_per_step)] if not config.sites else []
    if holds_micro_batch:
        key = "train_micro_batch_size_per_gpu"
        owned.append((key, "batch.micro_batch_size", batch.micro_batch_size))
    problems = [
        Problem(
            f"{label}: {key}",
            raw[key],
            f"contradicts {name} = {value} of the run, which owns it",
            f'remove it from {label} or write "auto"',
        )
        for key, name, value in owned
        if raw.get(key, AUTO) not in (AUTO, value)
    ]
    if problems:
        raise ConfigError(problems, "the plan")
    return {name: raw[key] for key, name in BATCH_KEYS.items() if raw.get(key, AUTO) != AUTO}


def derived_fields(config: RunConfig, named: Mapping[str, Any] | None) -> DerivedFields:
    """Return the function by which fields of the layouts of `config` follow from others: what the
    DeepSpeed JSON decides, and passes of a reference, which pipeline stages do not make. named: a
    checked DeepSpeed JSON for every layout; None for the shipped ones."""

    @functools.cache
    def fields(zero_stage: int, offloads_optimizer: bool, has_stages: bool) -> dict[str, Any]:
        raw = named
        if raw is None:
            raw = shipped_engine(zero_stage, offloads_optimizer=offloads_optimizer)
        raw = {key: value for key, value in raw.items() if key not in (*BATCH_KEYS, _BATCH)}
        staged = _with_stages(config, 2 if has_stages else 1)
        length = config.batch.sequence_length
        rendered, problems = render(staged, BatchPlan(1, 1, 1, 1, length), raw, "the plan's JSON")
        assert rendered is not None, problems
        num_reference_rows = config.objective.kind.num_reference_rows(staged)
        return {
            "num_reference_rows": num_reference_rows,
            **engine_fields(rendered.deepspeed, config, zero_stage),
        }

    return fields


_BATCH = "train_batch_size"


def allows_stages(config: RunConfig) -> bool:
    """Return whether the objective of `config` is computed alike with pipeline stages: a teacher in
    the run is not divided, and stages read stored scores instead of passes of a reference."""
    single, staged = _with_stages(config, 1), _with_stages(config, 2)
    kind = config.objective.kind
    is_read_alike = kind.reads_scores(single) == kind.reads_scores(staged)
    return is_read_alike and len(kind.problems(staged)) <= len(kind.problems(single))


def _with_stages(config: RunConfig, num_stages: int) -> RunConfig:
    parallel = config.parallel.model_copy(update={"pipeline": num_stages})
    return config.model_copy(update={"parallel": parallel})


def engine_fields(
    deepspeed: Mapping[str, Any], config: RunConfig, zero_stage: int
) -> dict[str, Any]:
    """Return the fields of a `Layout` that a rendered DeepSpeed configuration decides, other than
    the ZeRO stage and offload."""
    zero = deepspeed.get("zero_optimization", {})
    gradient_dtype = gradient_dtype_of(config, zero_stage) or config.precision.dtype
    return {
        "gradient_bytes": DTYPE_BYTES[gradient_dtype],
        "reduce_bucket_elements": int(zero.get("reduce_bucket_size", _BUCKET_ELEMENTS)),
        "gather_bucket_elements": int(zero.get("allgather_bucket_size", _BUCKET_ELEMENTS)),
        "overlap_communication": zero.get("overlap_comm") is True,
    }


_BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's default
