"""Errors that a comparison would not detect: settings whose change does not show in the numbers of
the reference, and thresholds that its steps do not cross."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from bigtrain.parity.comparison import compare
from bigtrain.parity.reference import train_reference, train_reordered
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.base import Section

_SECTIONS = ("objective", "moe", "optimizer", "adapters")
_FACTOR = 0.9
"""Factor on a setting: this change of it must be visible."""
_MARGIN = 1e-3
"""Least distance of a step's value from a threshold, on either side."""


def with_crossed_clipping(config: RunConfig) -> RunConfig:
    """Return `config` with a clipping norm between the norms of the steps, if it clips."""
    if not config.optimizer.clip_norm:
        return config
    (trace,) = train_reference(_with_values(config, "optimizer", clip_norm=0.0))
    geometric_mean = (min(trace.norms) * max(trace.norms)) ** 0.5
    return _with_values(config, "optimizer", clip_norm=float(f"{geometric_mean:.4g}"))


def invisible_settings(config: RunConfig) -> list[str]:
    """Return a line for each setting of the float32 run `config` whose change by a tenth would pass
    as rounding, and for each threshold that its steps do not cross."""
    (reference,), reordered = train_reference(config), train_reordered(config)
    lines = []
    for key, changed in _changed_settings(config):
        (trace,) = train_reference(changed)
        if compare([reference], trace, reordered).passed:
            lines.append(f"{key}: an error of a tenth would pass as rounding")
    for name, distances in reference.distances.items():
        for side, farthest in (("above", max(distances)), ("below", -min(distances))):
            if farthest < _MARGIN:
                lines.append(f"{name}: no step is {side} the threshold")
    return lines


def _changed_settings(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield the key of a number, and `config` with only this number changed. Numbers that are 0,
    and numbers that the run does not read, whose change its validation refuses, are omitted."""
    for name in _SECTIONS:
        section = getattr(config, name)
        if section is None:
            continue
        for key, values in _changed_values(section):
            if (name, key) == ("optimizer", "lr"):  # `RATES` are used instead
                continue
            try:
                yield f"{name}.{key}", _with_values(config, name, **values)
            except ValidationError:
                continue


def _changed_values(section: Section) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, for each number in `section`, its dotted key and the update {field: value} of the
    section that changes only this number."""
    for key, value in section:
        if isinstance(value, float) and value:  # a factor does not change 0
            yield key, {key: _FACTOR * value}
        elif isinstance(value, tuple) and all(isinstance(number, float) for number in value):
            for index, number in enumerate(value):
                if number:
                    changed = (*value[:index], _FACTOR * number, *value[index + 1 :])
                    yield f"{key}[{index}]", {key: changed}
        elif isinstance(value, Section):
            for inner_key, inner in _changed_values(value):
                # Not `eps`, which only prevents a division by 0: no result shows its change.
                if not inner_key.startswith("eps"):
                    yield f"{key}.{inner_key}", {key: {**dict(value), **inner}}


def _with_values(config: RunConfig, name: str, **values: object) -> RunConfig:
    """Return `config` with other values in the section `name`. Raises ValidationError for values
    that it does not read."""
    section = getattr(config, name)
    changed = type(section).model_validate({**dict(section), **values})
    return config.model_copy(update={name: changed})
