"""The page docs/reference/configuration.md: every field of the run YAML. Imports no torch."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.base import Section, section_within, takes_numbers
from tools.markdown import markdown_cell, sentence

# Units of the numbers that the end of a field's name does not tell.
UNITS = {
    "adapters.alpha": "ratio",
    "adapters.dropout": "ratio",
    "adapters.llm_int8_threshold": "magnitude",
    "adapters.rank": "features",
    "batch.global_batch_size": "samples",
    "batch.micro_batch_size": "samples",
    "batch.phases.global_batch_size": "samples",
    "batch.phases.micro_batch_size": "samples",
    "batch.phases.steps": "steps",
    "checkpoint.every_epochs": "epochs",
    "evaluation.every_epochs": "epochs",
    "checkpoint.keep_best": "checkpoints",
    "checkpoint.keep_last": "checkpoints",
    "checkpoint.max_failures": "saves",
    "checkpoint.memory.copies": "copies",
    "data.sources.epochs": "epochs",
    "data.sources.weight": "ratio",
    "data.workers": "threads",
    "engine.cpu_threads": "threads",
    "evaluation.early_stopping.min_delta": "of the metric",
    "evaluation.early_stopping.patience": "evaluations",
    "evaluation.max_new_tokens": "tokens",
    "evaluation.samples": "samples",
    "evaluation.tasks_fewshot": "examples",
    "evaluation.tasks_limit": "documents",
    "evaluation.temperature": "ratio",
    "guard.compare_every_steps": "optimizer steps",
    "guard.max_consecutive": "optimizer steps",
    "guard.max_rollbacks": "rollbacks",
    "guard.spike_sigma": "standard deviations",
    "guard.window": "optimizer steps",
    "model.gradient_checkpointing": "layers",
    "model.neftune_noise_alpha": "ratio",
    "model.tiled_mlp": "tiles",
    "model.vocabulary.pad_to_multiple_of": "rows",
    "moe.bias_update_rate": "score per optimizer step",
    "moe.z_loss_coefficient": "ratio",
    "objective.beta": "per log-probability, or weight of the odds ratio",
    "objective.center_rewards_coefficient": "ratio",
    "objective.desirable_weight": "ratio",
    "objective.undesirable_weight": "ratio",
    "objective.gamma": "reward",
    "objective.label_smoothing": "ratio",
    "objective.sft_weight": "ratio",
    "objective.temperature": "ratio",
    "objective.alpha": "share",
    "objective.teacher_top_k": "tokens",
    "objective.mtp_weight": "ratio",
    "objective.z_loss": "ratio",
    "optimizer.ema.decay": "ratio",
    "optimizer.adafactor.beta2_decay": "power of the step",
    "optimizer.adafactor.clip_threshold": "root mean square",
    "optimizer.adafactor.eps1": "root of the second moment",
    "optimizer.adafactor.eps2": "root mean square",
    "optimizer.betas": "ratio",
    "optimizer.clip_norm": "gradient norm",
    "optimizer.eps": "root of the second moment",
    "optimizer.lr": "per optimizer step",
    "optimizer.muon.eps": "norm",
    "optimizer.muon.lr": "per optimizer step",
    "optimizer.muon.momentum": "ratio",
    "optimizer.muon.ns_coefficients": "none",
    "optimizer.muon.split.interleaved": "times",
    "optimizer.muon.split.parts": "output features, or parts",
    "optimizer.muon.weight_decay": "per lr",
    "optimizer.weight_decay": "per lr",
    "parallel.expert": "ranks",
    "parallel.pipeline": "ranks",
    "parallel.sequence.ulysses": "ranks",
    "parallel.sequence.ring": "ranks",
    "parallel.tensor": "ranks",
    "precision.initial_loss_scale_power": "power of 2",
    "profile.ranks": "rank",
    "profile.steps": "optimizer steps",
    "seed": "none",
    "sites.count": "sites",
    "sites.fragments": "parts of the model",
    "sites.index": "counted from 0",
    "sites.mixing": "ratio",
    "sites.outer.lr": "ratio",
    "sites.outer.momentum": "ratio",
    "sites.shares": "relative numbers of samples",
    "schedule.cycles": "cycles",
    "train.epochs": "epochs",
    "train.steps": "optimizer steps",
    "watchdog.straggler_factor": "ratio",
}
_SUFFIXES = {
    "_seconds": "seconds",
    "_steps": "optimizer steps",
    "_length": "tokens",
    "_tokens": "tokens",
    "_ratio": "ratio",
    "_gib": "GiB",
    "_mib": "MiB",
    "_bytes": "bytes",
    "_fraction": "ratio",
}


def fields_page() -> str:
    """Return the page, without the line that names its source."""
    parts = [
        "Every field can also be given on the command line as `section.key=value`. A field without "
        "a default is required. `bigtrain check --config RUN.yaml --resolved` shows the values "
        "that a run gets. What DeepSpeed does with memory and communication is not here but in the "
        "[DeepSpeed JSON](../howto/deepspeed_json.md).\n",
    ]
    own = []
    for name, field in RunConfig.model_fields.items():
        section = section_within(field.annotation)
        if section is None:
            own.append(name)
        else:
            parts += _section(name, section)
    parts += ["## Without a section\n", _field_table("", RunConfig, own)]
    return "# Run YAML\n\n" + "\n".join(parts)


def _section(name: str, section: type[Section]) -> list[str]:
    parts = [f"## {name}\n", sentence(section.__doc__), _field_table(name, section)]
    for key, field in section.model_fields.items():
        nested = section_within(field.annotation)
        if nested is not None:
            path = f"{name}.{key}"
            parts += [f"### {path}\n", sentence(nested.__doc__)]
            parts += [_field_table(path, nested)]
    return parts


def _field_table(place: str, section: type[Section], names: Sequence[str] | None = None) -> str:
    """Table of the fields of a section (by default all), which is at `place`."""
    rows = ["| field | type | default | unit | meaning |", "|---|---|---|---|---|"]
    meanings = section.descriptions()
    for name in section.model_fields if names is None else names:
        field, path = section.model_fields[name], f"{place}.{name}".lstrip(".")
        cells = (
            f"`{path}`",
            _choices(field) or _type_text(field.annotation, field.metadata),
            _default_text(field),
            unit_of(path, field.annotation),
            markdown_cell(meanings.get(name, "")),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def numeric_fields(
    section: type[Section] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Path and annotation of every field that takes numbers."""
    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}".lstrip(".")
        nested = section_within(field.annotation)
        if nested is not None:
            yield from numeric_fields(nested, path)
        elif takes_numbers(field.annotation):
            yield path, field.annotation


def unit_of(path: str, annotation: Any) -> str:
    """Return the unit of a field's numbers; empty where it takes none, or where none is known."""
    if not takes_numbers(annotation):
        return ""
    by_name = (unit for suffix, unit in _SUFFIXES.items() if path.endswith(suffix))
    return UNITS.get(path) or next(by_name, "")


def _choices(field: FieldInfo) -> str:
    """Return the values of a text that is one of a table's; empty for other fields."""
    extra = field.json_schema_extra
    values = extra.get("enum") if isinstance(extra, dict) else None
    return " or ".join(f"`{value}`" for value in values) if isinstance(values, list) else ""


def _type_text(annotation: Any, constraints: list[Any]) -> str:
    """Return a type as a user of YAML reads it, with the limits of its numbers."""
    limits = _limits(constraints)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0], list(arguments[1:]))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        kinds = [_type_text(a, constraints) for a in arguments if a is not type(None)]
        kinds += ["null"] if type(None) in arguments else []
        return " or ".join(kinds)
    if origin is tuple:
        if arguments[1:] == (...,):
            return f"list of {_type_text(arguments[0], [])}"
        return f"list of {len(arguments)}: {', '.join(_type_text(a, []) for a in arguments)}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "mapping (below)"
    names: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names[annotation] + (limits if annotation in (int, float) else "")


def _limits(constraints: list[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits: list[str] = []
    for constraint in constraints:
        for item in (constraint, *getattr(constraint, "metadata", ())):
            for name, sign in signs.items():
                limit = getattr(item, name, None)
                if limit is not None:
                    limits.append(f"{sign} {limit:g}")
    return f" {', '.join(limits)}" if limits else ""


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is PydanticUndefined:
        assert field.default_factory is not None
        default = typing.cast("Any", field.default_factory)()
    if default is None:
        return "null"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{default}`"
