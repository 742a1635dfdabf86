"""`accelerate config` answered for two machines, and what it wrote launched on two real hosts."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cluster.conftest import COMMON, TRAIN, Lab
from tests.launch.conftest import ZERO3, metrics
from tests.support.accelerate_wizard import ACCELERATE, answer
from tests.support.cluster import finish


@pytest.mark.slow
def test_started_on_each_machine_with_a_deepspeed_json(lab: Lab, alone: dict[int, float]) -> None:
    """The run leaves engine, micro-batch and precision to the answers."""
    answers: dict[str, str | int] = {
        "How many different machines": "2",
        "What is the rank of this machine": 0,
        "IP address of the machine": lab.cluster.hosts["n1"],
        "What is the port": "29700",
        "same local network": "yes",
        "Which Type of launcher": 1,  # standard
        "specify a json file": "yes",
        "path to the json DeepSpeed config": str(ZERO3),
    }
    config_file = answer(lab.folder / "accelerate.yaml", answers)
    tree = yaml.safe_load(lab.run_yaml.read_text())
    del tree["engine"], tree["batch"]["micro_batch_size"]
    lab.run_yaml.write_text(yaml.safe_dump(tree))
    command = [ACCELERATE, "launch", "--config_file", config_file, "--machine_rank"]
    started = [
        lab.cluster.start(
            *(host, *command, rank, TRAIN, "--config", lab.run_yaml), cwd=lab.folder, **COMMON
        )
        for rank, host in (("1", "n2"), ("0", "n1"))
    ]
    for process in started:
        code, output = finish(process, timeout=250)
        assert code == 0, output
    rendered = json.loads((lab.folder / "run" / "deepspeed.json").read_text())
    assert rendered["zero_optimization"]["stage"] == 3
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)
