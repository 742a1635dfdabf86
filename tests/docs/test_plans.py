"""The plans of users' pages are plans: `bigtrain plan` uses every override that a page types."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bigtrain.cli import main
from tests.support.pages import page_blocks
from tests.support.worlds import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def typed_plans() -> list[str]:
    """Return the lines of all pages that plan a recipe with overrides, joined and without what
    writes files."""
    lines: list[str] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in (*page_blocks(text), *page_blocks(text, "bash")):
            lines += [line.strip() for line in block.replace("\\\n", " ").splitlines()]
    planned = [line for line in dict.fromkeys(lines) if line.startswith("bigtrain plan --config")]
    return [line for line in planned if "=" in line and "--write" not in line]


@pytest.mark.slow
@pytest.mark.parametrize("line", typed_plans())
def test_every_override_is_used(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([*shlex.split(line, comments=True)[1:], "--top", "1"])
    assert code == 0, capsys.readouterr().err
