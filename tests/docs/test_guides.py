"""`tools/guide.py` passes what is complete, and names what an incomplete addition lacks."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

import pytest

from tests.support.worlds import ROOT

COMPLETE = {
    "metric": "grad_norm",
    "objective": "kto",
    "optimizer": "lion",
    "degree": "sequence",
    "format": ".parquet",
    "row-format": "sharegpt",
    "launcher": "OMPI_COMM_WORLD_RANK",
}


def look(tool: ModuleType, guide: str, name: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["guide.py", guide, name, "--no-tests"])
        return int(tool.main())


def test_what_is_there_is_complete_and_a_made_up_name_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("guide")
    for guide, complete in COMPLETE.items():
        assert look(tool, guide, complete) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "PASS"
        assert look(tool, guide, "no" + "such" + "thing") == 1
        *steps, verdict = capsys.readouterr().out.splitlines()
        assert verdict == "FAIL"
        assert all(step.startswith("missing ") for step in steps)


def test_every_guide_of_the_tool_is_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = set(re.findall(r"python tools/guide\.py ([\w-]+)", text))
    tool = (ROOT / "tools/guide.py").read_text()
    assert listed == set(re.findall(r'^    "([\w-]+)": Guide\(', tool, re.MULTILINE))
