"""Overrides that a plan uses: settings of a layout, which every proposed layout then has, and
settings on which costs and legal layouts depend. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

from bigtrain.errors import ConfigError, Problem
from bigtrain.planner.engine_json import derived_fields, fields_of_batch, named_engine
from bigtrain.settings.deepspeed.engine_config import offload_device, zero_stage_of
from bigtrain.settings.degrees import MODEL_DEGREES
from bigtrain.settings.run_config import RunConfig

OFFLOAD, CHECKPOINTING = "model.activation_offload", "model.gradient_checkpointing"

FIELDS: Mapping[str, tuple[str, ...]] = {
    "parallel.tensor": ("tensor_size",),
    "parallel.pipeline": ("pipeline_size",),
    "parallel.sequence": ("sequence_size", "ring_size"),
    "parallel.expert": ("expert_size",),
    "batch.micro_batch_size": ("micro_batch_size",),
    CHECKPOINTING: ("recompute", "recompute_every"),
    OFFLOAD: ("offload_activations",),
    "model.tiled_mlp": ("tiled_mlp",),
    "engine.deepspeed_config": (
        "zero_stage", "offload_optimizer", "offload_parameters", "reduce_bucket_elements",
        "gather_bucket_elements", "overlap_communication",
    ),
}  # fmt: skip
"""Settings that a plan chooses, and the fields of a `Layout` that each decides. Without an override
the plan chooses them, whatever the run YAML has."""


USED = (
    *FIELDS,
    # The model, and how its layers compute.
    "model.path", "model.config", "model.type", "model.overrides", "model.vocabulary",
    "model.attention", "model.frozen", "model.loss", "model.loss_chunk_tokens", "model.kernels",
    "model.compile", "precision.dtype", "precision.gradient_dtype", "precision.float8",
    # Samples of a step, and what they are.
    "batch.sequence_length", "batch.global_batch_size", "batch.global_tokens",
    "data.document_boundaries", "data.packing",
    # What is trained, and what a rank keeps.
    "optimizer.type", "optimizer.state_dtype", "optimizer.muon.ns_steps", "optimizer.muon.ns_dtype",
    "optimizer.ema", "adapters.type", "adapters.rank", "adapters.targets",
    "adapters.target_parameters", "adapters.modules_to_save", "adapters.dora", "adapters.init",
    "adapters.quantization", "adapters.double_quantization",
    "objective.type", "objective.loss", "objective.mtp_weight", "objective.reference",
    "objective.teacher_model", "objective.z_loss", "objective.label_smoothing",
    "checkpoint.asynchronous", "checkpoint.memory", "moe.bias_update_rate", "sites.count",
    "sites.fragments", "guard.compare_every_steps", "evaluation.early_stopping",
)  # fmt: skip
"""Settings on which a plan depends: those that it chooses, and those that decide which layouts are
legal, what they cost, or what it remarks."""


def unused_settings(
    overrides: Sequence[str], config: Callable[[Sequence[str]], RunConfig] | None = None
) -> list[Problem]:
    """Return a problem for every ``section.key=value`` string that sets nothing that a plan uses; a
    part of a used setting counts. A section counts by the keys that it names, and by other used
    settings that it replaces; a key of an absent section by the section. config: returns the run
    with some of the overrides."""
    problems = []
    for override in overrides:
        path, _, text = override.partition("=")
        named: list[tuple[str, Any]] = [(path, text)]
        if "." not in path:
            with suppress(yaml.YAMLError):
                section = yaml.safe_load(text)
                if isinstance(section, Mapping) and section:
                    named = [(f"{path}.{name}", value) for name, value in section.items()]
        if any("." in key and _touches(key, setting) for key, _ in named for setting in USED):
            continue
        if _changes_section(path, overrides, config):
            continue
        key, value = named[0]
        section_name = path.partition(".")[0]
        same_section = [setting for setting in USED if setting.partition(".")[0] == section_name]
        (nearest,) = difflib.get_close_matches(key, same_section or USED, n=1, cutoff=0.0)
        rule = "changes nothing in a plan"
        remedy = f"omit it, or --write, which keeps it; the nearest that a plan uses is {nearest}"
        problems.append(Problem(key, value, rule, remedy))
    return problems


def _changes_section(
    path: str, overrides: Sequence[str], config: Callable[[Sequence[str]], RunConfig] | None
) -> bool:
    """Return whether the override of the dotted `path` adds its section to a run that
    has none, or, as a section, changes used settings that it does not name."""
    if config is None:
        return False
    name = path.partition(".")[0]
    try:
        changed = getattr(config(overrides), name, None)
        other_overrides = [text for text in overrides if text.partition("=")[0] != path]
        before = getattr(config(other_overrides), name, None)
    except ConfigError:  # a run that needs the override
        return False
    if before is None or "." in path:
        return before is None and changed is not None
    keys = [setting.partition(".")[2] for setting in USED if setting.startswith(f"{name}.")]
    return any(_value(before, key) != _value(changed, key) for key in keys)


def _value(section: Any, key: str) -> Any:
    """Return the value of a dotted `key` of a section; None where a part is absent."""
    for name in key.split("."):
        section = getattr(section, name, None)
    return section


def settings_of(overrides: Iterable[str]) -> list[str]:
    """Return the keys of `FIELDS` that ``section.key=value`` strings set, as a whole or in part; a
    section sets every key in the section."""
    paths = [override.partition("=")[0] for override in overrides]
    return [setting for setting in FIELDS if any(_touches(path, setting) for path in paths)]


def _touches(path: str, setting: str) -> bool:
    """Return whether the dotted `path` is `setting`, a part of the setting, or a section that
    contains the setting."""
    return f"{setting}.".startswith(f"{path}.") or path.startswith(f"{setting}.")


def batch_settings(overrides: Sequence[str]) -> list[Problem]:
    """Return a problem for every override of what a plan of the longest sample searches."""
    searched = ("batch.sequence_length", "batch.global_batch_size", "batch.global_tokens")
    rule = "is what --longest searches"
    return [
        Problem(path, text, rule, "omit it, or --longest")
        for path, _, text in (override.partition("=") for override in overrides)
        if any(_touches(path, setting) for setting in searched)
    ]


def repeated_settings(overrides: Sequence[str]) -> list[Problem]:
    """Return a problem for every setting that two overrides set to different values: a plan could
    hold only one."""
    problems, first_texts = [], dict[str, str]()
    for path, _, text in (override.partition("=") for override in overrides):
        first = first_texts.setdefault(path, text)
        if first != text:
            rule = f"contradicts {path}={text}, another override"
            problems.append(Problem(path, first, rule, "keep one of them"))
    return problems


def with_implied(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return `overrides` with recomputation of all layers where activations are offloaded, which
    are the inputs of recomputed layers, and none of the overrides is about recomputation: the run
    YAML's is not one of a plan."""
    last = {path: text for path, _, text in (override.partition("=") for override in overrides)}
    with suppress(yaml.YAMLError):
        offloads = yaml.safe_load(last.get(OFFLOAD, "")) is True
        if offloads and not any(_touches(path, CHECKPOINTING) for path in last):
            return (*overrides, f"{CHECKPOINTING}=full")
    return tuple(overrides)


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
    raw: dict[str, Any] | None = None
    if "engine.deepspeed_config" in settings:
        raw = named_engine(config)
        stage = zero_stage_of(raw)
        values |= {
            "zero_stage": stage,
            "offload_optimizer": offload_device(raw, "offload_optimizer") is not None,
            "offload_parameters": offload_device(raw, "offload_param") is not None,
            **derived_fields(config, raw)(stage, False, config.parallel.pipeline > 1),
        }
    if OFFLOAD in settings and config.model.activation_offload:
        settings.append(CHECKPOINTING)
    names = [name for setting in settings for name in FIELDS[setting]]
    required = {name: values[name] for name in names if values[name] is not None}
    if raw is None:
        return required
    batch_fields = fields_of_batch(raw, config, "batch.micro_batch_size" in settings)
    return required | batch_fields
