"""A compiler that does not work ends a run with one line that names the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import Inputs, launch, launcher


@pytest.mark.slow
def test_a_compiler_that_fails_is_named(
    inputs: Inputs, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    settings = ["model.compile=on", f"output.directory={tmp_path / 'run'}"]
    finished = launch([*launcher("python"), "--config", inputs.run_yaml, *settings], home)
    assert finished.code != 0
    (line,) = [line for line in finished.output.splitlines() if line.startswith("train.py: ")]
    assert "rank 0: layers could not be compiled (" in line
    assert str(tmp_path / "g++") in line
    assert line.endswith("-> model.compile=off")
    assert "Traceback" not in finished.output
