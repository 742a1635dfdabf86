"""`accelerate config` answered at its own prompts, and what it wrote launched as it is.

tests/cluster has the answers for two machines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.conftest import STEPS, TRAIN, Finished, Inputs, launch, metrics, run_tree
from tests.support.accelerate_wizard import answer
from tests.support.worlds import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def silent_run(inputs: Inputs, directory: Path) -> Path:
    """A run YAML that leaves engine, micro-batch and precision to the answers."""
    tree: dict[str, Any] = run_tree(inputs.shards, directory / "run")
    for name in ("engine", "precision"):
        del tree[name]
    del tree["batch"]["micro_batch_size"]
    tree["output"]["export"] = False
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def launched(config_file: Path, run_yaml: Path, home: Path) -> Finished:
    module = ["-m", "accelerate.commands.launch", "--config_file", config_file]
    port = ["--main_process_port", str(free_port())]
    return launch([*module, *port, TRAIN, "--config", run_yaml], home)


@pytest.mark.slow
def test_answers_run_as_they_are(
    inputs: Inputs, home: Path, finished_run: Path, tmp_path: Path
) -> None:
    answers: dict[str, str | int] = {
        "ZeRO optimization stage": 3,
        "Where to offload optimizer": 1,
        "Where to offload parameters": 1,
        "How many gradient accumulation": "2",
        "use gradient clipping": "yes",
        "What is the gradient clipping value": "1.0",
    }
    config_file = answer(tmp_path / "accelerate.yaml", answers)
    finished = launched(config_file, silent_run(inputs, tmp_path), home)
    assert finished.code == 0, finished.output
    rendered = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    zero = rendered["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (3, "cpu")
    assert rendered["gradient_accumulation_steps"] == 2
    assert rendered["train_micro_batch_size_per_gpu"] == 2
    losses = metrics(tmp_path / "run")
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(metrics(finished_run), abs=1e-5)


ENTER = {
    # The first row of the menu, on a machine without GPUs.
    "Which type of machine": 0,
    "Do you want to use DeepSpeed": "no",
    "run your training on CPU only": "no",
    "What GPU(s)": "all",
    "enable numa efficiency": "no",
}
"""Further answers, where a user presses Enter at every question."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "batch", "accumulation"),
    [
        ({"should be used for distributed training": "1"}, {}, 4),
        ({"should be used for distributed training": "2"}, {"micro_batch_size": 1}, 4),
        (ENTER, {"micro_batch_size": 1}, 8),
    ],
    ids=["one process", "two processes", "enter at every question"],
)
def test_the_wizard_s_defaults_start_a_run_as_it_is(
    inputs: Inputs,
    home: Path,
    finished_run: Path,
    tmp_path: Path,
    answers: dict[str, str | int],
    batch: dict[str, int],
    accumulation: int,
) -> None:
    """Accumulation 1 and ZeRO 2 are what Enter answers, so a run's own values count."""
    config_file = answer(tmp_path / "accelerate.yaml", answers)
    tree: dict[str, Any] = run_tree(inputs.shards, tmp_path / "run")
    tree["batch"] |= batch
    tree["output"]["export"] = False
    run_yaml = tmp_path / "run.yaml"
    run_yaml.write_text(yaml.safe_dump(tree))
    finished = launched(config_file, run_yaml, home)
    assert finished.code == 0, finished.output
    assert "Traceback" not in finished.output
    rendered = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    assert rendered["gradient_accumulation_steps"] == accumulation
    assert rendered["zero_optimization"]["stage"] == 0
    assert metrics(tmp_path / "run") == pytest.approx(metrics(finished_run), abs=1e-5)
    if answers is not ENTER:
        said = (tmp_path / "run" / "log.txt").read_text()
        assert "gradient_accumulation_steps = 1 is the wizard's default and counts as" in said
