"""A run as YAML with comments, which are the settings' own descriptions. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import yaml

from bigtrain.settings.json_schema import SHIPPED
from bigtrain.settings.run_config import RunConfig, Section

_WIDTH = 100


def commented_yaml(tree: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """`tree`, sections of a run, as the text of a run YAML.

    Every section and setting has its description as a comment, and a section that has others than
    those of `tree` their names. `head`: lines of the comment at the top.
    """
    lines = [f"# yaml-language-server: $schema={SHIPPED}"]
    lines += [f"# {line}".rstrip() for line in head]
    for name, value in tree.items():
        field = RunConfig.model_fields[name]
        section = section_of(field.annotation)
        lines.append("")
        if section is None or not isinstance(value, Mapping):
            lines += _comment(field.description or "", "")
            lines += _setting(name, value, "")
            continue
        lines += _comment(section.__doc__ or "", "")
        lines.append(f"{name}:")
        lines += _section(section, value)
    return "\n".join(lines) + "\n"


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field of `annotation` holds; None for any other field."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def setting_names(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """The names of all settings as the command line takes them, ``section.key``; not those of
    sections in a list."""
    for name, field in section.model_fields.items():
        nested = section_of(field.annotation)
        if nested is None:
            yield f"{prefix}{name}"
        else:
            yield from setting_names(nested, f"{prefix}{name}.")


def _section(section: type[Section], values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield from _comment(section.model_fields[key].description or "", "  ")
        yield from _setting(key, value, "  ")
    others = [name for name in section.model_fields if name not in values]
    if others:
        yield from _comment(f"also: {', '.join(others)}", "  ")


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(" ".join(text.split()), _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"


def _setting(key: str, value: Any, indent: str) -> Iterator[str]:
    text = yaml.safe_dump({key: value}, sort_keys=False, width=_WIDTH, allow_unicode=True)
    for line in text.splitlines():
        yield f"{indent}{line}"
