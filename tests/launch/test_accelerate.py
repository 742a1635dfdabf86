"""`accelerate config` answered at its own prompts, and what it wrote launched as it is.

tests/cluster has the answers for two machines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.conftest import STEPS, TRAIN, ZERO3, Finished, Inputs, launch, metrics, run_tree
from tests.support.accelerate_wizard import answer
from tests.support.worlds import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def silent_run(inputs: Inputs, directory: Path, **sections: Any) -> Path:
    """A run YAML that leaves engine, micro-batch and precision to the answers."""
    tree: dict[str, Any] = run_tree(inputs.shards, directory / "run")
    for name in ("engine", "precision"):
        del tree[name]
    del tree["batch"]["micro_batch_size"]
    tree["output"]["export"] = False
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump({**tree, **sections}))
    return path


def launched(config_file: Path, run_yaml: Path, home: Path) -> Finished:
    module = ["-m", "accelerate.commands.launch", "--config_file", config_file]
    port = ["--main_process_port", str(free_port())]
    return launch([*module, *port, TRAIN, "--config", run_yaml], home)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param(
            {
                "ZeRO optimization stage": 3,
                "Where to offload optimizer": 1,
                "Where to offload parameters": 1,
                "How many gradient accumulation": "2",
                "use gradient clipping": "yes",
                "What is the gradient clipping value": "1.0",
            },
            {"stage": 3, "offload": "cpu", "accumulation": 2, "micro": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"specify a json file": "yes", "path to the json DeepSpeed config": str(ZERO3)},
            {"stage": 3, "offload": None, "accumulation": 4, "micro": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["zero3-offload", "file"],
)
def test_answers_run_as_they_are(
    answers: dict[str, str | int],
    expected: dict[str, Any],
    inputs: Inputs,
    home: Path,
    finished_run: Path,
    tmp_path: Path,
) -> None:
    config_file = answer(tmp_path / "accelerate.yaml", answers)
    # A JSON leaves precision to the run; the wizard's own answer is float32.
    asked = {} if expected["offload"] is not None else {"precision": {"dtype": "float32"}}
    finished = launched(config_file, silent_run(inputs, tmp_path, **asked), home)
    assert finished.code == 0, finished.output
    rendered = json.loads((tmp_path / "run" / "deepspeed.json").read_text())
    zero = rendered["zero_optimization"]
    assert {
        "stage": zero["stage"],
        "offload": zero.get("offload_optimizer", {}).get("device"),
        "accumulation": rendered["gradient_accumulation_steps"],
        "micro": rendered["train_micro_batch_size_per_gpu"],
    } == expected
    losses = metrics(tmp_path / "run")
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(metrics(finished_run), abs=1e-5)


@pytest.mark.slow
def test_contradiction_names_both(inputs: Inputs, home: Path, tmp_path: Path) -> None:
    config_file = answer(tmp_path / "accelerate.yaml", {"use mixed precision": 2})
    run_yaml = silent_run(inputs, tmp_path, precision={"dtype": "float32"})
    finished = launched(config_file, run_yaml, home)
    assert finished.code != 0
    said = "mixed_precision = 'bf16': contradicts precision.dtype = float32 of the run"
    assert finished.output.count(said) == 1
    assert not (tmp_path / "run").exists()
