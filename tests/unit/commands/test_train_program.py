"""train.py before bigtrain's own errors: outside of its environment, and with DeepSpeed's flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.train import build_parser
from tests.support.worlds import ROOT


def test_without_the_packages_it_is_one_line(tmp_path: Path) -> None:
    """-S: no site-packages, as with the Python of the system."""
    finished = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "bigtrain" / "train.py", "--config", "quickstart"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 2
    [line] = finished.stderr.splitlines()
    assert line.startswith(f"train.py: {sys.executable} (Python ")
    assert "has no package '" in line
    assert "-> activate the environment in which bigtrain is installed" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed", "--deepspeed_config", "zero2", "--config", "RUN.yaml", "train.steps=3"],
        ["--config", "RUN.yaml", "--deepspeed", "train.steps=3", "--deepspeed-config", "zero2"],
        ["train.steps=3", "--local_rank=0", "--config=RUN.yaml", "--deepspeed_config=zero2"],
    ],
)
def test_flags_of_a_deepspeed_script_are_taken(words: list[str]) -> None:
    arguments = build_parser().parse_intermixed_args(words)
    assert (arguments.config, arguments.deepspeed_config) == ("RUN.yaml", "zero2")
    assert arguments.overrides == ["train.steps=3"]
