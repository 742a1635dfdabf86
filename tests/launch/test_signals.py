"""What a scheduler or a person sends to a launcher: saved at the next step, and stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bigtrain.run import checkpoints
from tests.launch.conftest import Inputs, launcher, metrics, start, wait

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "received"),
    [
        ("python", signal.SIGUSR1),
        ("deepspeed", signal.SIGTERM),
        ("torchrun", signal.SIGTERM),
        ("accelerate", signal.SIGINT),
    ],
)
def test_stops_under_launcher(
    name: str, received: signal.Signals, inputs: Inputs, home: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = ["--config", inputs.run_yaml, f"output.directory={run}", "train.steps=1000000"]
    process = start([*launcher(name), *words, "evaluation.every_steps=1000000"], home)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "step 3/" in line:
            # To all processes of the step or the terminal, launchers included, which pass it on.
            os.killpg(process.pid, received)
            break
    finished = wait(process)
    output = "".join(seen) + finished.output
    assert f"stopped by {received.name} after step " in output
    # Launchers end with codes of their own.
    assert finished.code == 75 if name == "python" else finished.code != 0, output
    step = checkpoints.steps(run)[-1]
    assert checkpoints.damage(checkpoints.checkpoint_path(run, step), "all") is None
    assert max(metrics(run)) == step
    assert f"stopped by {received.name} after step {step} of 1000000" in output
    assert (run / "requeue").exists() == (received != signal.SIGINT)
    assert not (run / "hf").exists()
