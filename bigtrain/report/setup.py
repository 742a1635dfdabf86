"""Resolved configuration, DeepSpeed JSON and versions of runs, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from bigtrain.report.figures import NOT_KNOWN
from bigtrain.report.run_files import Run

_NOT_VERSIONS = ("topology", "rank_order", "hosts", "packing")
_MOST_CHARACTERS = 500


def setup_html(runs: Sequence[Run]) -> str:
    """Return a table for each of the three; with several runs first a table of the differences."""
    environments = [
        {k: v for k, v in (run.files.environment or {}).items() if k not in _NOT_VERSIONS}
        for run in runs
    ]
    names = [run.name for run in runs]
    tables = [
        ("Configuration", "config.json, resolved", [run.files.config or {} for run in runs]),
        ("DeepSpeed", "deepspeed.json, as passed to the engine", [_deepspeed(run) for run in runs]),
        ("Versions", "environment.json", environments),
    ]
    parts = []
    if len(runs) > 1:
        rows = [
            (f"{title}: {key}" if title != "Configuration" else key, values)
            for title, _, objects in tables
            for key, values in _rows(objects)
            if len(set(values)) > 1
        ]
        parts.append("<h3>Differences</h3>")
        parts.append(_table(names, rows) if rows else "<p>Nothing.</p>")
    for title, source, objects in tables:
        rows = list(_rows(objects))
        body = _table(names, rows) if rows else "<p>None.</p>"
        parts.append(
            f"<details><summary>{title} <small>{source}, {_count(rows)}</small></summary>"
            f"{body}</details>"
        )
    return "".join(parts)


def _count(rows: Sequence[Any]) -> str:
    return "1 entry" if len(rows) == 1 else f"{len(rows)} entries"


def _deepspeed(run: Run) -> dict[str, Any]:
    return run.files.deepspeed or {}


def _rows(objects: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every key that any of the objects has, and its value in each."""
    flat = [dict(_flatten(one)) for one in objects]
    for key in dict.fromkeys(key for one in flat for key in one):
        yield key, tuple(one.get(key, NOT_KNOWN) for one in flat)


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


def _table(names: Sequence[str], rows: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    several = len(names) > 1
    heads = [f'<th scope="col">{escape(name)}</th>' for name in names] if several else []
    head = f'<thead><tr><th scope="col">Key</th>{"".join(heads)}</tr></thead>' if several else ""
    body = "".join(
        f'<tr{_marked(values)}><th scope="row">{_breakable(escape(key))}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for key, values in rows
    )
    return f'<div class="scroll"><table class="keys">{head}<tbody>{body}</tbody></table></div>'


def _breakable(key: str) -> str:
    """Return `key` with line-break opportunities between its words."""
    return key.replace(".", ".<wbr>").replace("_", "_<wbr>")


def _marked(values: Sequence[str]) -> str:
    return ' class="differs"' if len(set(values)) > 1 else ""
