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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    own = [link for link in links if "://" not in link]
    assert [link for link in own if not (page.parent / link).exists()] == []
