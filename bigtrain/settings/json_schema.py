"""The JSON schema of the run YAML, for editors that complete and check it. Pure.

`run_schema.json` beside this file is `run_schema()` as text; a test keeps it so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bigtrain.settings.run_config import RunConfig

SHIPPED = Path(__file__).resolve().parent / "run_schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run_schema() -> dict[str, Any]:
    """The schema that pydantic derives from the settings: their types, limits, choices, defaults
    and descriptions. What a rule over several settings refuses, only `bigtrain check` knows."""
    schema = RunConfig.model_json_schema()
    described: dict[str, Any] = _without_titles(schema)
    for name, field in described["properties"].items():
        # A reference stands beside its description from this dialect on.
        section = described["$defs"].get(str(field.get("$ref", "")).rpartition("/")[2])
        if section is not None:
            described["properties"][name] = {**field, "description": section["description"]}
    return {
        "$schema": _DIALECT,
        **described,
        "title": "A run of bigtrain",
        "description": "One training run: https://json-schema.org for editors; `bigtrain check` "
        "knows all rules.",
    }


def schema_text() -> str:
    """`run_schema()` as the text of a file."""
    return json.dumps(run_schema(), indent=1, ensure_ascii=False) + "\n"


def _without_titles(tree: Any) -> Any:
    """`tree` without the titles that pydantic makes of names, and with one-line descriptions."""
    if isinstance(tree, list):
        return [_without_titles(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "description" and isinstance(value, str):
            found[key] = " ".join(value.split())
        elif key in ("properties", "$defs"):  # names, not keywords
            found[key] = {name: _without_titles(item) for name, item in value.items()}
        else:
            found[key] = _without_titles(value)
    return found
