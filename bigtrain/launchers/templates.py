"""Templates of the files that launchers write, next to this file, filled in by Jinja."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render(template: str, /, **values: Any) -> str:
    """Return `template` with these values; ``tojson`` also writes YAML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return environment.get_template(template).render(values)
