"""The benchmark of chat and packing runs; what it measures, no test asserts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.worlds import ROOT


@pytest.mark.slow
def test_it_runs() -> None:
    script = ROOT / "benchmarks" / "chat_and_packing.py"
    finished = subprocess.run(
        [sys.executable, str(script), "--tiny"], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert set(figures["chat"]) == {"marked", "unmarked"}
    assert all(figures["chat"][name]["times_faster"] > 0 for name in figures["chat"])
    assert set(figures["packing"]) == {"2048", "4096", "32768"}
