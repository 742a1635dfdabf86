"""A run that one process began goes on over two, evaluates, saves and exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import STEPS, Inputs, metrics, trained

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "degree"), [("zero1", "tensor"), ("pipeline_zero1", "pipeline")]
)
def test_goes_on_with_two_processes(
    engine: str, degree: str, finished_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    checkpoints.remove(checkpoints.checkpoint_path(run, STEPS))
    shutil.rmtree(run / "hf")
    arguments = ["--config", inputs.run_yaml, "--deepspeed_config", engine]
    settings = [f"output.directory={run}", f"parallel.{degree}=2"]
    output = trained(*arguments, *settings, num_processes=2)
    assert "resumed at step 8 " in output
    assert "stage=" not in output  # what DeepSpeed's PipelineModule prints
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("held_out_loss", 1e-5)):
        expected = metrics(finished_run, key)
        assert metrics(run, key) == pytest.approx(expected, rel=tolerance), key
    topology = json.loads((run / "environment.json").read_text())["topology"]
    assert (topology["data_size"], topology[f"{degree}_size"]) == (1, 2)
    assert "same logits" in (run / "log.txt").read_text()
    weights = load_file(run / "hf" / "model.safetensors")
    reference = load_file(finished_run / "hf" / "model.safetensors")
    assert weights.keys() == reference.keys()
    for name, weight in reference.items():
        assert_close(weights[name], weight, rtol=0, atol=1e-5)
