"""`tools/guide.py` passes what is complete, and names what an incomplete addition lacks."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.worlds import ROOT

COMPLETE = {
    "metric": "grad_norm",
    "objective": "kto",
    "optimizer": "lion",
    "format": ".parquet",
    "launcher": "OMPI_COMM_WORLD_RANK",
}


def look(guide: str, name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/guide.py", guide, name, "--no-tests"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("guide", COMPLETE)
def test_what_is_there_is_complete_and_a_made_up_name_is_not(guide: str) -> None:
    complete, made_up = look(guide, COMPLETE[guide]), look(guide, "no" + "such" + "thing")
    assert (complete.returncode, complete.stdout.splitlines()[-1]) == (0, "PASS")
    lines = made_up.stdout.splitlines()
    assert (made_up.returncode, lines[-1]) == (1, "FAIL")
    assert all(line.startswith("missing ") for line in lines[:-1])


def test_every_guide_of_the_tool_is_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = set(re.findall(r"python tools/guide\.py (\w+)", text))
    tool = (ROOT / "tools/guide.py").read_text()
    assert listed == set(re.findall(r'^    "(\w+)": Guide\(', tool, re.MULTILINE))
