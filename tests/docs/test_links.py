"""Links between the pages lead somewhere."""

from __future__ import annotations

import re

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
