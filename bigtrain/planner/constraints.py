"""Settings of a layout that a plan is held to, because its overrides set them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bigtrain.settings.deepspeed.engine_config import (
    find_deepspeed_config,
    offload_device,
    read_deepspeed_config,
)
from bigtrain.settings.degrees import MODEL_DEGREES
from bigtrain.settings.run_config import RunConfig

FIELDS: Mapping[str, tuple[str, ...]] = {
    "parallel.tensor": ("tensor_size",),
    "parallel.pipeline": ("pipeline_size",),
    "parallel.sequence": ("sequence_size", "ring_size"),
    "parallel.expert": ("expert_size",),
    "batch.micro_batch_size": ("micro_batch_size",),
    "model.gradient_checkpointing": ("recompute", "recompute_every"),
    "model.activation_offload": ("offload_activations",),
    "model.tiled_mlp": ("tiled_mlp",),
    "engine.deepspeed_config": (
        "zero_stage", "offload_optimizer", "offload_parameters", "reduce_bucket_elements",
        "gather_bucket_elements", "overlap_communication",
    ),
}  # fmt: skip
"""Settings that a plan chooses, and the fields of a `Layout` that each decides. Without an override
the plan chooses them, whatever the run YAML has."""


def settings_of(overrides: Iterable[str]) -> list[str]:
    """Return the keys of `FIELDS` that ``section.key=value`` strings set; a section set as a whole
    sets all keys of the section."""
    paths = [override.partition("=")[0] for override in overrides]
    names = [f"{path}." for path in paths]
    return [
        setting
        for setting in FIELDS
        if any(f"{setting}.".startswith(name) or name.startswith(f"{setting}.") for name in names)
    ]


def required_fields(config: RunConfig, overrides: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a `Layout` that `overrides` decide, with the values of `config`, which
    they were applied to. Reads a DeepSpeed JSON that they name; raises ConfigError if it is not
    one."""
    settings = settings_of(overrides)
    checkpointing = config.model.gradient_checkpointing
    values: dict[str, Any] = {
        **{name: getattr(config.parallel.degrees, name) for name in MODEL_DEGREES},
        "micro_batch_size": config.batch.micro_batch_size,
        "recompute": "none" if checkpointing == "none" else "full",
        "recompute_every": checkpointing if isinstance(checkpointing, int) else 1,
        "offload_activations": config.model.activation_offload,
        "tiled_mlp": config.model.tiled_mlp,
    }
    if "engine.deepspeed_config" in settings:
        raw = read_deepspeed_config(find_deepspeed_config(config.engine.deepspeed_config))
        zero = raw.get("zero_optimization", {})
        values |= {
            "zero_stage": int(zero.get("stage", 0)),
            "offload_optimizer": offload_device(raw, "offload_optimizer") is not None,
            "offload_parameters": offload_device(raw, "offload_param") is not None,
            "reduce_bucket_elements": int(zero.get("reduce_bucket_size", 500_000_000)),
            "gather_bucket_elements": int(zero.get("allgather_bucket_size", 500_000_000)),
            "overlap_communication": zero.get("overlap_comm") is True,
        }
    if "model.activation_offload" in settings and config.model.activation_offload:
        # It moves the inputs of recomputed layers.
        settings.append("model.gradient_checkpointing")
    names = [name for setting in settings for name in FIELDS[setting]]
    return {name: values[name] for name in names if values[name] is not None}
