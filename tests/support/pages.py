"""Commands and files that a page of the docs tells its reader to type."""

from __future__ import annotations

import re

from tests.support.worlds import ROOT


def page_text(name: str) -> str:
    """Return `name`: such as ``docs/howto/chat.md``, with continued command lines as one line."""
    return re.sub(r" *\\\n *", " ", (ROOT / name).read_text(encoding="utf-8"))


def page_files(text: str) -> dict[str, str]:
    """Return the contents of the files that the page shows: of blocks below a line that names
    one."""
    files = re.findall(r"`([\w-]+\.(?:yaml|jinja))`:\n\n```\w+\n(.*?)^```", text, flags=re.M | re.S)
    return dict(files)


def page_blocks(text: str, language: str = "") -> list[str]:
    """Return the contents of its code blocks of a language; the empty one is of command lines."""
    return re.findall(rf"^```{language}\n(.*?)^```", _without_others(text, language), re.M | re.S)


def _without_others(text: str, language: str) -> str:
    """Without the blocks of other languages, whose ends look like the beginning of one without."""
    return re.sub(
        r"^```(\w*)\n.*?^```$",
        lambda block: block[0] if block[1] == language else "",
        text,
        flags=re.M | re.S,
    )
