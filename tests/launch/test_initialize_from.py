"""`checkpoint.initialize_from`: the weights of a run or a Hugging Face directory, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bigtrain.engine.checkpoint_io import read_full, read_full_masters
from bigtrain.run import checkpoints
from bigtrain.train import main
from tests.launch.conftest import STEPS, Inputs, run_tree, snapshot

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("alone")]


def start_from(source: Path, inputs: Inputs, run: Path, **model: Any) -> int:
    """One step of a run that starts from `source`, with a learning rate that changes nothing."""
    tree = run_tree(inputs.shards, run)
    tree["model"]["config"] |= model
    tree |= {
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-30},
        "schedule": {"type": "constant"},
        "checkpoint": {"initialize_from": str(source)},
        "evaluation": {"samples": 8},
        "engine": {"deepspeed_config": "zero2"},
    }
    tree["output"]["export"] = False
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree))
    return main(["--config", str(path)])


@pytest.mark.parametrize("kind", ["run", "checkpoint", "hf"])
def test_weights_are_taken_and_nothing_else(
    kind: str, finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    step = STEPS
    source = {"run": finished_run, "hf": finished_run / "hf"}.get(kind)
    if source is None:
        step = 8
        source = checkpoints.checkpoint_path(finished_run, step)
    before = snapshot(source)
    run = tmp_path / "run"
    assert start_from(source, inputs, run) == 0
    directory = checkpoints.find(run, 1)
    weights = read_full_masters(directory / "tensors")
    old = read_full_masters(checkpoints.checkpoint_path(finished_run, step) / "tensors")
    assert weights.keys() == old.keys()
    for name, tensor in old.items():
        assert torch.equal(weights[name], tensor), name
    state = checkpoints.read_state(directory)
    assert (state["step"], state["samples"], state["engine"]["optimizer_steps"]) == (1, 8, 1)
    # The first moment after one step from nothing: (1 - beta1) times the clipped gradient.
    first = read_full(directory / "tensors", kinds=("exp_avg",)).values()
    norm = torch.sqrt(sum((t.double().square().sum() for t in first), torch.zeros(())))
    assert float(norm) <= 0.1 * 1.0 + 1e-6
    assert snapshot(source) == before


def test_another_shape_is_refused(
    finished_run: Path, inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start_from(finished_run, inputs, tmp_path / "a", intermediate_size=48) == 2
    said = capfd.readouterr().err
    assert "has shape [64, 32] there and [48, 32] in this run's model" in said
    assert start_from(finished_run / "hf", inputs, tmp_path / "b", intermediate_size=48) == 2
    assert "checkpoint.initialize_from = " in capfd.readouterr().err


def test_what_is_no_source_is_refused(
    finished_run: Path, inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert start_from(tmp_path / "empty", inputs, tmp_path / "run") == 2
    assert "is no run, checkpoint or Hugging Face directory" in capfd.readouterr().err
    assert start_from(tmp_path / "nowhere", inputs, tmp_path / "run") == 2
    assert "nowhere': not found" in capfd.readouterr().err
    assert start_from(tmp_path / "run", inputs, tmp_path / "run") == 2
    assert "is this run's own output.directory" in capfd.readouterr().err
    damaged = tmp_path / "damaged"
    shutil.copytree(finished_run, damaged)
    for step in (8, STEPS):
        (checkpoints.checkpoint_path(damaged, step) / "state.json").unlink()
    assert start_from(damaged, inputs, tmp_path / "run") == 2
    assert "checkpoint.initialize_from: " in (said := capfd.readouterr().err)
    assert "step-00000012/state.json: missing" in said
    assert not (tmp_path / "run").exists()
