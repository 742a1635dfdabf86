"""train.py with pipeline stages: the same run, evaluated, saved and exported, as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch.conftest import Inputs, metrics, train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_two_stages_make_the_same_run(inputs: Inputs, finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--config", inputs.run_yaml, "--deepspeed_config", "pipeline_zero1"]
    settings = ["parallel.pipeline=2", f"output.directory={run}"]
    finished = train(*words, *settings, num_processes=2)
    assert finished.code == 0, finished.output
    assert "pipeline stages: layers 0-0, 1-1" in (run / "log.txt").read_text()
    assert "stage=" not in finished.output  # what DeepSpeed's PipelineModule prints
    for key in ("loss", "held_out_loss", "grad_norm"):
        assert metrics(run, key) == pytest.approx(metrics(finished_run, key), rel=1e-4, abs=1e-5)
    ours = load_file(run / "hf" / "model.safetensors")
    alone = load_file(finished_run / "hf" / "model.safetensors")
    assert ours.keys() == alone.keys()
    for name, tensor in alone.items():
        assert float((ours[name] - tensor).abs().max()) < 1e-5, name
