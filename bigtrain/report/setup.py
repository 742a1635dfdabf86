"""Resolved configuration, DeepSpeed JSON and versions of runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.report.figures import NOT_KNOWN
from bigtrain.report.run_files import Run

_NOT_VERSIONS = ("topology", "rank_order", "hosts", "packing")
_MAX_CHARACTERS = 500


class SettingRow(NamedTuple):
    """Key, its value in each run, and whether the values differ."""

    key: str
    values: tuple[str, ...]
    differs: bool


def setup(runs: Sequence[Run]) -> dict[str, Any]:
    """Return title, source and rows of three tables (configuration, DeepSpeed JSON, versions), and
    the rows that differ."""
    environments = [run.files.environment or {} for run in runs]
    versions = [
        {name: value for name, value in environment.items() if name not in _NOT_VERSIONS}
        for environment in environments
    ]
    engines = [run.files.deepspeed or {} for run in runs]
    tables = [
        ("Configuration", "config.json, resolved", _rows([run.files.config or {} for run in runs])),
        ("DeepSpeed", "deepspeed.json, as passed to the engine", _rows(engines)),
        ("Versions", "environment.json", _rows(versions)),
    ]
    differences = [
        SettingRow(f"{title}: {row.key}" if title != "Configuration" else row.key, row.values, True)
        for title, _, rows in tables
        for row in rows
        if row.differs
    ]
    return {"differences": differences, "tables": tables}


def _rows(objects: Sequence[Mapping[str, Any]]) -> list[SettingRow]:
    """Return a row for every key of the runs' objects."""
    flat_objects = [dict(_flatten(value)) for value in objects]
    rows = []
    for key in dict.fromkeys(key for flat_object in flat_objects for key in flat_object):
        values = tuple(flat_object.get(key, NOT_KNOWN) for flat_object in flat_objects)
        rows.append(SettingRow(key, values, differs=len(set(values)) > 1))
    return rows


def _flatten(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield leaves, with their keys joined by dots; lists and empty objects are leaves."""
    for key, entry in value.items():
        name = f"{above}{key}"
        if isinstance(entry, dict) and entry:
            yield from _flatten(entry, f"{name}.")
        else:
            text = entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)
            is_long = len(text) > _MAX_CHARACTERS
            yield name, f"{text[:_MAX_CHARACTERS]}…" if is_long else text
