"""A run that one process began goes on cut over two, evaluates, saves and exports."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import STEPS, Inputs, metrics, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_goes_on_with_tensor_parallelism(
    finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    checkpoints.remove(checkpoints.checkpoint_path(run, STEPS))
    shutil.rmtree(run / "hf")
    arguments = ["--config", inputs.run_yaml, "--deepspeed_config", "zero1"]
    degree = [f"output.directory={run}", "parallel.tensor=2"]
    finished = train(*arguments, *degree, num_processes=2)
    assert finished.code == 0, finished.output
    assert "resumed at step 8 " in finished.output
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("held_out_loss", 1e-5)):
        expected = metrics(finished_run, key)
        assert metrics(run, key) == pytest.approx(expected, rel=tolerance), key
    topology = json.loads((run / "environment.json").read_text())["topology"]
    assert (topology["data_size"], topology["tensor_size"]) == (1, 2)
    assert "same logits" in (run / "log.txt").read_text()
    weights = load_file(run / "hf" / "model.safetensors")
    reference = load_file(finished_run / "hf" / "model.safetensors")
    assert weights.keys() == reference.keys()
    for name, weight in reference.items():
        assert_close(weights[name], weight, rtol=0, atol=1e-5)


def test_degree_that_does_not_fit_is_refused_before_anything_starts(
    inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    degree = [f"output.directory={run}", "parallel.tensor=2", "model.config.num_attention_heads=3"]
    degree += ["model.config.num_key_value_heads=3", "model.config.hidden_size=48"]
    finished = train("--config", inputs.run_yaml, *degree, num_processes=2)
    assert finished.code != 0
    assert "parallel.tensor = 2: does not divide the model's num_attention_heads = 3" in (
        finished.output
    )
    # 3 divides the heads, but not two processes. The rank that says so first is named.
    assert re.search(r"nearest: 1( \(rank 1 of 2\))?\n", finished.output)
    assert not run.exists()
