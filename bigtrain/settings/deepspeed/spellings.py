"""Other ways to write a DeepSpeed JSON: further names of a key, blocks that are off, comments, a
scheduler without values.

DeepSpeed 0.19.8 reads a key of a block by its alias or by its pydantic field name
(``populate_by_name``, runtime/config_utils.py), replaces deprecated keys, and ignores unknown keys
at the top. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.deepspeed.keys import AUTO, key_table, value_at

_COMMENT_MARKS = ("_", "#", "//")
_COMMENT_NAMES = ("comment", "comments")

# Parameters of DeepSpeed's schedulers, with the values that a run's schedule has anyway.
_RUN_SCHEDULER_VALUES: Mapping[str, Any] = {
    "warmup_min_lr": 0,
    "warmup_type": "linear",
    "last_batch_iteration": -1,
}


def with_known_names(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a copy of `tree` in which each key that DeepSpeed knows has the name in `keys.json`.

    Raises ConfigError where one key is given under two names.
    """
    table = key_table()
    renamed: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in tree.items():
        known_name = table["former_blocks"].get(name, name)
        if known_name in renamed or (known_name != name and known_name in tree):
            problems.append(_given_twice(source, name, known_name))
        renamed[known_name] = value
    # "zero_optimization": true is how stage 1 was written (`read_zero_config_deprecated`).
    if isinstance(renamed.get("zero_optimization"), bool):
        renamed["zero_optimization"] = {"stage": int(renamed["zero_optimization"])}
    renamed = _with_field_names(renamed, table["keys"], source, problems)
    if problems:
        raise ConfigError(problems, source)
    return renamed


def _with_field_names(
    block: Mapping[str, Any], known_keys: Mapping[str, Any], source: str, problems: list[Problem]
) -> dict[str, Any]:
    """Return `block`, with its inner blocks, in which each key has its name in `known_keys`, and
    deprecated keys are replaced as in DeepSpeed. Adds keys that are given twice to `problems`."""
    aliases = {node["field"]: alias for alias, node in known_keys.items() if "field" in node}
    renamed: dict[str, Any] = {}
    for name, value in block.items():
        known_name, known_value = aliases.get(name, name), value
        replacements = known_keys.get(name, {}).get("becomes", {})
        if json.dumps(value) in replacements:
            known_name = known_keys[name]["deprecated"]
            known_value = replacements[json.dumps(value)]
            if known_value is None:  # the deprecated switch is off: omit it
                continue
        if known_name in renamed or (known_name != name and known_name in block):
            problems.append(_given_twice(source, name, known_name))
        node = known_keys.get(known_name, {})
        if "keys" in node and isinstance(known_value, Mapping):
            known_value = _with_field_names(known_value, node["keys"], source, problems)
        renamed[known_name] = known_value
    return renamed


def _given_twice(source: str, name: str, known_name: str) -> Problem:
    rule = f"is another name of {known_name}, which is given too"
    return Problem(f"{source}: {name}", None, rule, "keep one of them")


def is_comment(name: str, value: object) -> bool:
    """Return whether a key of a JSON is a remark: named as one, with a text or a list of texts."""
    is_marked = name.startswith(_COMMENT_MARKS) or name.lower() in _COMMENT_NAMES
    texts = value if isinstance(value, list) else [value]
    return is_marked and all(isinstance(text, str) for text in texts)


def is_off(block: object) -> bool:
    """Return whether a block is off: it has ``"enabled": false``, or only the values false, null
    and blocks that are off. An empty block is not off."""
    if not isinstance(block, Mapping) or not block:
        return False
    values = [value for value in block.values() if not is_off(value)]
    return block.get("enabled") is False or all(value in (False, None) for value in values)


def is_scheduler_of_run(scheduler: object) -> bool:
    """Return whether a ``scheduler`` block sets nothing: each value is "auto", or a value that the
    run's schedule has anyway (a linear warm-up from zero)."""
    params = value_at(scheduler, "params")
    return (
        isinstance(params, Mapping)
        and AUTO in params.values()
        and all(
            value == AUTO or _RUN_SCHEDULER_VALUES.get(name, AUTO) == value
            for name, value in params.items()
        )
    )


_RATE_AFTER_WARMUP = {
    "WarmupLR": "is then constant",
    "WarmupDecayLR": "then falls linearly to 0",
    "WarmupCosineLR": "then falls by a cosine to 0.0001 of the peak",
}
"""The learning rate of DeepSpeed's schedulers (runtime/lr_schedules.py) after the warm-up."""


def _difference_from_run(scheduler: object) -> str:
    """Return the end of the note on a ``scheduler`` block: how the learning rate of its type would
    change. Empty for an unknown type."""
    after = _RATE_AFTER_WARMUP.get(str(value_at(scheduler, "type")))
    if after is None:
        return ""
    warmup_type = value_at(value_at(scheduler, "params"), "warmup_type")
    warmup = "linearly" if warmup_type == "linear" else "by the logarithm of the step"
    return f", not DeepSpeed's, which warms up {warmup} and {after}"


def omitted_keys(
    tree: Mapping[str, Any], refused_blocks: Mapping[str, object], parents: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield each dotted key of `tree` that is accepted but not passed to DeepSpeed, with the
    reason. refused_blocks: dotted keys that are refused unless they are off."""
    for name, value in tree.items():
        key = f"{parents}{name}"
        if is_comment(name, value):
            yield key, "is a comment"
        elif key == "scheduler" and is_scheduler_of_run(value):
            scheduler_type = value_at(value, "type")
            yield (
                key,
                f"({scheduler_type}) has no values of its own: schedule.* of the run is used"
                f"{_difference_from_run(value)}",
            )
        elif key in refused_blocks and is_off(value):
            yield key, "is off"
        elif isinstance(value, Mapping):
            yield from omitted_keys(value, refused_blocks, f"{key}.")


def without_keys(tree: Mapping[str, Any], omitted: set[str], parents: str = "") -> dict[str, Any]:
    """Return a copy of `tree` without the dotted keys `omitted`."""
    remaining: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{parents}{name}"
        if key in omitted:
            continue
        is_block = isinstance(value, Mapping)
        remaining[name] = without_keys(value, omitted, f"{key}.") if is_block else value
    return remaining
