"""The benchmark of remote inputs runs, on very little text."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.worlds import ROOT


@pytest.mark.slow
def test_tiny() -> None:
    words = [sys.executable, "benchmarks/remote_input.py", "--megabytes", "2", "--rounds", "1"]
    result = subprocess.run(
        [*words, "--vocab-size", "300", "--workers", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "each line broken twice: same bytes" in result.stdout
    assert "ratio s3 / disk" in result.stdout
