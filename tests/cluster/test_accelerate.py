"""`accelerate config` answered for two machines, and what it wrote launched on two real hosts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.launchers.deepspeed_env import inspect_environment_file
from tests.cluster.conftest import COMMON, TRAIN, Lab
from tests.launch.conftest import ZERO3, metrics
from tests.support.accelerate_wizard import ACCELERATE, answer
from tests.support.cluster import finish

LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]  # the menu's rows


def two_machines(lab: Lab, launcher: str, **more: str) -> Path:
    """The wizard's file for n1 and n2 with one process each; `more` are words and answers."""
    answers: dict[str, str | int] = {
        "How many different machines": "2",
        "What is the rank of this machine": 0,
        "IP address of the machine": lab.cluster.hosts["n1"],
        "What is the port": "29700",
        "same local network": "yes",
        "Which Type of launcher": LAUNCHERS.index(launcher),
        **more,
    }
    if launcher != "standard":
        (lab.folder / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
        answers |= {
            "location of hostfile": str(lab.folder / "hosts"),
            "exclusion filter string?": "no",
            "inclusion filter string?": "no",
        }
    return answer(lab.folder / "accelerate.yaml", answers)


def silent_run(lab: Lab, **sections: Any) -> Path:
    """The run of `lab`, which leaves engine, micro-batch and precision to the answers."""
    tree = yaml.safe_load(lab.run_yaml.read_text())
    del tree["engine"], tree["precision"], tree["batch"]["micro_batch_size"]
    lab.run_yaml.write_text(yaml.safe_dump({**tree, **sections}))
    return lab.run_yaml


def engine(lab: Lab) -> tuple[int, int]:
    """ZeRO stage and accumulation of the engine that the run was started with."""
    rendered = json.loads((lab.folder / "run" / "deepspeed.json").read_text())
    return rendered["zero_optimization"]["stage"], rendered["gradient_accumulation_steps"]


def test_started_on_each_machine_with_a_deepspeed_json(lab: Lab, alone: dict[int, float]) -> None:
    file = {"specify a json file": "yes", "path to the json DeepSpeed config": str(ZERO3)}
    config_file = two_machines(lab, "standard", **file)
    command = [ACCELERATE, "launch", "--config_file", config_file, "--machine_rank"]
    script = [TRAIN, "--config", silent_run(lab, precision={"dtype": "float32"})]
    started = [
        lab.cluster.start(host, *command, rank, *script, cwd=lab.folder, **COMMON)
        for rank, host in (("1", "n2"), ("0", "n1"))
    ]
    for process in started:
        code, output = finish(process, timeout=250)
        assert code == 0, output
    assert engine(lab)[0] == 3
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_pdsh_launcher_leaves_secrets_that_we_find(lab: Lab, alone: dict[int, float]) -> None:
    config_file = two_machines(lab, "pdsh", **{"How many gradient accumulation": "3"})
    command = [ACCELERATE, "launch", "--config_file", config_file]
    script = [TRAIN, "--config", silent_run(lab)]
    code, output = lab.run("n1", *command, *script, HF_TOKEN="hf_geheim")
    assert code == 0, output
    assert engine(lab) == (2, 3)
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)
    [problem] = inspect_environment_file(lab.folder / ".deepspeed_env")
    assert "lets others read HF_TOKEN" in problem
