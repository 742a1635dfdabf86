"""Text in cells of Markdown tables."""

from __future__ import annotations

import re


def markdown_cell(text: str) -> str:
    """Return `text` in a cell of a table: one line, and nothing of it is read as Markdown or
    HTML."""
    line = " ".join(text.split()).replace("``", "`")
    for sign, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*")):
        line = line.replace(sign, written)
    return re.sub(r"([\[\]])", r"\\\1", line)


def sentence(text: str | None) -> str:
    """Return the first paragraph of `text` as one line that ends with a full stop."""
    words = " ".join((text or "").split("\n\n")[0].split())
    return f"{words}{'' if words.endswith('.') else '.'}\n"
