"""Errors that a comparison would not detect: settings whose change does not show in the numbers of
the reference, and thresholds that its steps do not cross."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from bigtrain.parity.comparison import compare
from bigtrain.parity.reference import train_reference, train_reordered
from bigtrain.settings.run_config import RunConfig

_SECTIONS = ("objective", "moe", "optimizer", "adapters")
_CHANGE = 0.9
"""Factor of a setting whose change must be visible."""
_MARGIN = 1e-3
"""Least distance from a threshold, on either side."""


def with_crossed_clipping(config: RunConfig) -> RunConfig:
    """Return `config` with a clipping norm between the norms of its steps, if it clips."""
    if not config.optimizer.clip_norm:
        return config
    (trace,) = train_reference(_with(config, "optimizer", clip_norm=0.0))
    middle = (min(trace.norms) * max(trace.norms)) ** 0.5
    return _with(config, "optimizer", clip_norm=float(f"{middle:.4g}"))


def invisible_settings(config: RunConfig) -> list[str]:
    """Return a line for each setting of the float32 run `config` whose change by a tenth would pass
    as rounding, and for each threshold that its steps do not cross."""
    (reference,), reordered = train_reference(config), train_reordered(config)
    lines = []
    for key, changed in _changed_settings(config):
        (other,) = train_reference(changed)
        if compare([reference], other, reordered).passed:
            lines.append(f"{key}: an error of a tenth would pass as rounding")
    for name, distances in reference.distances.items():
        for side, nearest in (("above", max(distances)), ("below", -min(distances))):
            if nearest < _MARGIN:
                lines.append(f"{name}: no step is {side} the threshold")
    return lines


def _changed_settings(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield `config` with one number changed, by the number's key. Numbers that are 0, and those
    that the run does not read, which its validation refuses, are not changed."""
    for name in _SECTIONS:
        section = getattr(config, name)
        for key, value in [] if section is None else list(section):
            if (name, key) == ("optimizer", "lr"):  # `RATES` are used instead
                continue
            if hasattr(value, "decay"):
                numbers = {f"{key}.decay": type(value)(decay=_CHANGE * value.decay)}
            elif isinstance(value, float) and value:
                numbers = {key: _CHANGE * value}
            elif key == "betas":
                numbers = {f"{key}[0]": (_CHANGE * value[0], value[1])}
                numbers |= {f"{key}[1]": (value[0], _CHANGE * value[1])}
            else:
                continue
            for shown, changed in numbers.items():
                try:
                    yield f"{name}.{shown}", _with(config, name, **{key: changed})
                except ValidationError:
                    continue


def _with(config: RunConfig, name: str, **values: object) -> RunConfig:
    """Return `config` with other values in the section `name`. Raises ValidationError for values
    that it does not read."""
    section = getattr(config, name)
    changed = type(section).model_validate({**dict(section), **values})
    return config.model_copy(update={name: changed})
