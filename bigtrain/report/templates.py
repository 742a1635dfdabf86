"""Templates of the page, in `static/`: `page.html`, and in `sections.html` a macro for each
section. Jinja escapes all text of a run's files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

STATIC = Path(__file__).with_name("static")


def page(**values: Any) -> str:
    """Return the page with these values."""
    return _environment().get_template("page.html").render(values)


def section(name: str, **values: Any) -> str:
    """Return the HTML of the macro `name` for these arguments."""
    macro = getattr(_environment().get_template("sections.html").module, name)
    return str(macro(**values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(STATIC),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["commas"] = "{:,}".format
    return environment
