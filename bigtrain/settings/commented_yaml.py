"""Run YAML with the settings' descriptions as comments, and its JSON schema for editors. Pure.

`run_schema.json` in this directory is the text of `run_schema()`; a test compares them.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bigtrain.settings.run_config import RunConfig, Section
from bigtrain.settings.sections.base import section_of
from bigtrain.system.shipped_files import checkout

_WIDTH = 100


def commented_yaml(tree: Mapping[str, Any], head: Sequence[str] = (), folder: Path = Path()) -> str:
    """Return `tree`, sections of a run, as the text of a run YAML.

    Every section and setting has its description as a comment. The settings of a section that
    `tree` omits are listed at its end. `head`: lines of the comment at the top. `folder`: directory
    of the file; in a checkout of bigtrain, the first line names the schema by a relative path.
    """
    lines = []
    if (checkout() / "pyproject.toml").is_file() and folder.resolve().is_relative_to(checkout()):
        lines.append(f"# yaml-language-server: $schema={os.path.relpath(SHIPPED, folder)}")
    lines += [f"# {line}".rstrip() for line in head]
    for name, value in tree.items():
        field = RunConfig.model_fields[name]
        section = section_of(field.annotation)
        lines.append("")
        if section is None or not isinstance(value, Mapping):
            lines += _comment_lines(RunConfig.descriptions()[name], "")
            lines += _setting_lines(name, value, "")
            continue
        lines += _comment_lines(section.__doc__ or "", "")
        lines.append(f"{name}:")
        descriptions = section.descriptions()
        for key, setting in value.items():
            lines += _comment_lines(descriptions.get(key, ""), "  ")
            lines += _setting_lines(key, setting, "  ")
        unset_names = [name for name in section.model_fields if name not in value]
        if unset_names:
            lines += _comment_lines(f"also: {', '.join(unset_names)}", "  ")
    return "\n".join(lines) + "\n"


def setting_names(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings as the command line takes them, ``section.key``; not of the
    settings in a list of sections."""
    for name, field in section.model_fields.items():
        nested = section_of(field.annotation)
        if nested is None:
            yield f"{prefix}{name}"
        else:
            yield from setting_names(nested, f"{prefix}{name}.")


def _comment_lines(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"


def _setting_lines(key: str, value: Any, indent: str) -> Iterator[str]:
    text = yaml.safe_dump({key: value}, sort_keys=False, width=_WIDTH, allow_unicode=True)
    for line in text.splitlines():
        yield f"{indent}{line}"


SHIPPED = Path(__file__).resolve().parent / "run_schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run_schema() -> dict[str, Any]:
    """Return the schema that pydantic derives from the settings: their types, limits, choices,
    defaults and descriptions. Rules over several settings are not in the schema; `bigtrain check`
    applies them."""
    schema = RunConfig.model_json_schema()
    described: dict[str, Any] = _without_titles(schema)
    for name, field in described["properties"].items():
        # Since this dialect, a reference may have a description next to it.
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
    """Return `run_schema()` as the text of a file."""
    return json.dumps(run_schema(), indent=1, ensure_ascii=False) + "\n"


def _without_titles(tree: Any) -> Any:
    """Return `tree` without the titles that pydantic makes of names, and with one-line
    descriptions."""
    if isinstance(tree, list):
        return [_without_titles(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    cleaned: dict[str, Any] = {}
    for key, value in tree.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "description" and isinstance(value, str):
            cleaned[key] = " ".join(value.split())
        elif key in ("properties", "$defs"):  # a setting may be called title or description
            cleaned[key] = {name: _without_titles(item) for name, item in value.items()}
        else:
            cleaned[key] = _without_titles(value)
    return cleaned
