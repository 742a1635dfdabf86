"""The benchmark of `bigtrain tokenize` runs, on very little text."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.worlds import ROOT


@pytest.mark.slow
def test_tiny() -> None:
    words = [sys.executable, "benchmarks/tokenizing.py", "--megabytes", "0.1"]
    words += ["--vocab-size", "300", "--rounds", "1"]
    result = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    ratio = "ratio command after start-up / its encoder only"
    for figure in (ratio, "reference encoder only", "peak memory of"):
        assert figure in result.stdout
