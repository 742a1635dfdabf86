"""Accepted values of each DeepSpeed key, and the test that covers each value.

The table is accepted.json: a key or a value without a row is refused. `Verdict` is the test
coverage of a row. Cases of `TEST` are generated from the rows that are ``trained``: training from
`model.path`, a checkpoint, a resume on another topology and the exported weights, compared with
plain PyTorch. Pure; imports neither torch nor deepspeed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bigtrain.errors import Problem
from bigtrain.settings.deepspeed.keys import AUTO, value_at

TEST = "tests/parity/test_deepspeed_keys.py"

Verdict = Literal["trained", "owned", "untested"]
"""trained: by the cases of `TEST`. owned: the run sets it, and any other value is refused, so every
test that trains has it. untested: it needs hardware or a library that no test has."""

_TABLE: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("accepted.json").read_text(encoding="utf-8")
)
_UNPROVEN = "this value has not been compared with plain PyTorch"

REFUSED_BLOCKS: Mapping[str, tuple[str, str]] = {
    key: (reason, remedy) for key, (reason, remedy) in _TABLE["refused"].items()
}
"""Keys and blocks known to DeepSpeed, but owned by the run YAML, or without effect in a bigtrain
run: the reason and the fix of each."""


@dataclass(frozen=True)
class Row:
    """A class of values of a key.

    values: the class in words. takes: returns whether a value belongs to it. examples: values that
    are trained one at a time; together: values trained at once with values of other rows.
    engines: engines of `TEST` that train each example. beside: other keys that the examples need.
    alone: whether the examples need a separate process. needs: requirement of an untested value, a
    key of the table's "needs". note: remarks.
    """

    key: str
    values: str
    takes: Callable[[Any], bool]
    verdict: Verdict = "trained"
    examples: tuple[Any, ...] = ()
    together: tuple[Any, ...] = ()
    engines: tuple[str, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    needs: str = ""
    note: str = ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_VALUE_CLASSES: Mapping[str, Callable[[Any], bool]] = {
    "the run's": lambda _: True,
    "1": lambda value: _is_number(value) and value == 1,
    "numbers from 0 to 1": lambda value: _is_number(value) and 0 <= value <= 1,
    "a text": lambda value: isinstance(value, str) and value != "",
    "lists of texts": lambda value: (
        isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    ),
}
_INTEGERS = re.compile(r"(?:integers|multiples of (\d+)) from (-?\d+)(?: to (\d+))?")


def _value_class(values: Any) -> tuple[str, Callable[[Any], bool]]:
    """Return the words for a class of values, and the function that returns whether a value belongs
    to it. values: a list of the values, where 1 is not true; or the name of a class, where integers
    may be floats, as 5e7."""
    if isinstance(values, list):
        words = " or ".join(json.dumps(value).strip('"') for value in values)
        return words, lambda candidate: any(
            type(candidate) is type(v) and candidate == v for v in values
        )
    if values in _VALUE_CLASSES:
        return values, _VALUE_CLASSES[values]
    match = _INTEGERS.fullmatch(values)
    assert match is not None, values
    multiple, minimum, maximum = int(match[1] or 1), int(match[2]), float(match[3] or "inf")

    def takes(value: Any) -> bool:
        if not _is_number(value) or not math.isfinite(value) or value != value // 1:
            return False
        return bool(minimum <= value <= maximum and value % multiple == 0)

    return values, takes


def _row_of_table(key: str, values: Any, **entries: Any) -> Row:
    """Return a row of accepted.json as a `Row`. entries: its further fields, as JSON."""
    entries["note"] = _TABLE["needs"].get(entries.get("needs"), entries.get("note", ""))
    entries["engines"] = tuple(entries.get("engines", "").split())
    for name in ("examples", "together"):
        entries[name] = tuple(entries.get(name, ()))
    return Row(key, *_value_class(values), **entries)


ROWS: tuple[Row, ...] = (
    *(_row_of_table(key, "the run's", verdict="owned") for key in _TABLE["owned"]),
    *(_row_of_table(**row) for row in _TABLE["rows"]),
)


def rows_of(key: str) -> list[Row]:
    """Return the classes of values of a dotted key."""
    return [row for row in ROWS if row.key == key]


def row_of(key: str, value: Any) -> Row | None:
    """Return the class of a key that `value` belongs to."""
    return next((row for row in rows_of(key) if row.takes(value)), None)


def leaves(tree: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key below `tree` that is not a block, with its value."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*parents, name))
        else:
            yield ".".join((*parents, name)), value


def check_values(tree: Mapping[str, Any], source: str, skipped: set[str]) -> Iterator[Problem]:
    """Yield a problem for each key of `tree` that has a value without a row.

    skipped: keys, and blocks of keys, for which there is a problem already.
    """
    for key, value in leaves(tree):
        if value == AUTO or any(f"{key}.".startswith(f"{block}.") for block in skipped):
            continue
        if row_of(key, value) is None:
            allowed = " or ".join(row.values for row in rows_of(key))
            remedy = f"{allowed}, or omit it" if allowed else "remove it"
            yield Problem(f"{source}: {key}", value, _TABLE["reasons"].get(key, _UNPROVEN), remedy)


def not_tried(tree: Mapping[str, Any], dtype: str) -> list[str]:
    """Return the keys of `tree` that a run in `dtype` uses with values no test has trained with."""
    # By the `needs` of a row: whether a run with this JSON does not use its key.
    zero = value_at(tree, "zero_optimization", {})
    is_unused = {
        "float16": dtype != "float16",
        "nvme": value_at(zero, "offload_param.device") != "nvme",
        "offloaded": value_at(zero, "offload_optimizer.device", "none") in ("none", AUTO),
        "super_offload": value_at(zero, "offload_optimizer.super_offload") is not True,
    }
    rows = ((key, row_of(key, value)) for key, value in leaves(tree) if value != AUTO)
    return sorted(
        key
        for key, row in rows
        if row is not None and row.verdict == "untested" and not is_unused.get(row.needs, False)
    )
