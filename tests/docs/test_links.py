"""Links between the pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.worlds import ROOT

PAGES = sorted(
    page
    for folder in (ROOT, *(ROOT / name for name in ("ds_configs", "hostfiles", "slurm")))
    for page in folder.glob("*.md")
)
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def test_links_lead_to_files() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        own = [link for link in links if "://" not in link]
        assert [link for link in own if not (page.parent / link).exists()] == [], page


CODE_COLUMNS = 88
"""Columns of a code block on the site at a width of 1,400 pixels; longer lines are cut off."""


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_line_of_code_is_wider_than_the_page(page: Path) -> None:
    is_code, too_long = False, []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif is_code and len(line) > CODE_COLUMNS:
            too_long.append(line)
    assert too_long == [], f"{page}: continue a command by a backslash, break other code"
