"""The commands of the page on scores, as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

import bigtrain
from tests.launch.conftest import Inputs, finished_run, inputs, metrics, run_tree
from tests.support.lives import run_script
from tests.support.pages import page_text
from tests.support.worlds import ROOT

PAGE = page_text("docs/howto/scores.md")
WORKER = ROOT / "tests/launch/command_worker.py"

__all__ = ["finished_run", "inputs"]
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def test_the_commands_as_they_stand(inputs: Inputs, finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "hf", tmp_path / "base")
    tree = run_tree(inputs.shards, tmp_path / "run") | {"model": {"path": "base"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    one, two, kept = re.findall(r"^.*bigtrain (score .*)$", PAGE, flags=re.M)[:3]
    run_script(1, WORKER, tmp_path, *one.split())
    scores = bigtrain.open_scores(tmp_path / "scores")
    sums = scores.sums("train")
    assert len(sums) == len(bigtrain.open_dataset(inputs.shards))
    # The limits of the page keep some of these documents, and no second pass is made.
    output = run_script(1, WORKER, tmp_path, *kept.split())
    assert "documents scored" not in output
    assert 0 < len(bigtrain.open_dataset(tmp_path / "kept")) <= len(sums)
    shutil.rmtree(tmp_path / "scores")
    run_script(2, WORKER, tmp_path, *two.split())
    again = bigtrain.open_scores(tmp_path / "scores")
    assert again.sums("train") == pytest.approx(sums, rel=1e-6)
    train = ROOT / "tests/launch/extension_worker.py"
    more = ("data.path=kept", "train.steps=2", "output.export=false")
    run_script(1, train, tmp_path, "--config", "run.yaml", *more)
    assert metrics(tmp_path / "run")
