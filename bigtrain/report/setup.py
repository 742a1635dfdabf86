"""Resolved configuration, DeepSpeed JSON and versions of runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bigtrain.report.figures import NOT_KNOWN
from bigtrain.report.run_files import Run

_NOT_VERSIONS = ("topology", "rank_order", "hosts", "packing")
_MOST_CHARACTERS = 500


Rows = list[tuple[str, tuple[str, ...], bool]]
"""Keys, their value in each run, and whether these differ."""


def setup(runs: Sequence[Run]) -> dict[str, Any]:
    """Return title, source and rows of a table for each of the three, and the rows that differ."""
    environments = [
        {k: v for k, v in (run.files.environment or {}).items() if k not in _NOT_VERSIONS}
        for run in runs
    ]
    engines = [run.files.deepspeed or {} for run in runs]
    tables = [
        ("Configuration", "config.json, resolved", _rows([run.files.config or {} for run in runs])),
        ("DeepSpeed", "deepspeed.json, as passed to the engine", _rows(engines)),
        ("Versions", "environment.json", _rows(environments)),
    ]
    differences = [
        (f"{title}: {key}" if title != "Configuration" else key, values, True)
        for title, _, rows in tables
        for key, values, differs in rows
        if differs
    ]
    return {"differences": differences, "tables": tables}


def _rows(objects: Sequence[Mapping[str, Any]]) -> Rows:
    """Return every key that any of the objects has, and its value in each."""
    flat_objects = [dict(_flatten(value)) for value in objects]
    rows = []
    for key in dict.fromkeys(key for flat_object in flat_objects for key in flat_object):
        values = tuple(flat_object.get(key, NOT_KNOWN) for flat_object in flat_objects)
        rows.append((key, values, len(set(values)) > 1))
    return rows


def _flatten(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield leaves, with their keys joined by dots; lists and empty objects are leaves."""
    for key, entry in value.items():
        name = f"{above}{key}"
        if isinstance(entry, dict) and entry:
            yield from _flatten(entry, f"{name}.")
        else:
            text = entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)
            cut = len(text) > _MOST_CHARACTERS
            yield name, f"{text[:_MOST_CHARACTERS]}…" if cut else text
