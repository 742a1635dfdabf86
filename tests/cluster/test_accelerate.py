"""`accelerate config` answered for two machines, and what it wrote launched on two real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.launch.remote_environment import inspect_environment_file
from tests.cluster.conftest import COMMON, TRAIN, Lab
from tests.launch.conftest import metrics
from tests.support.accelerate_wizard import ACCELERATE, answer
from tests.support.cluster import finish

LAUNCHERS = ["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"]  # the menu's rows


def two_machines(lab: Lab, launcher: str) -> Path:
    """The wizard's file for n1 and n2 with one process each."""
    answers: dict[str, str | int] = {
        "How many different machines": "2",
        "What is the rank of this machine": 0,
        "IP address of the machine": lab.cluster.hosts["n1"],
        "What is the port": "29700",
        "same local network": "yes",
        "Which Type of launcher": LAUNCHERS.index(launcher),
        "How many gradient accumulation": "3",
    }
    if launcher != "standard":
        (lab.folder / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
        answers |= {
            "location of hostfile": str(lab.folder / "hosts"),
            "exclusion filter string?": "no",
            "inclusion filter string?": "no",
        }
    return answer(lab.folder / "accelerate.yaml", answers)


@pytest.mark.slow
def test_standard_launcher(lab: Lab, alone: dict[int, float]) -> None:
    config_file = two_machines(lab, "standard")
    command = [ACCELERATE, "launch", "--config_file", config_file, "--machine_rank"]
    script = [TRAIN, "--config", lab.run_yaml, "engine.deepspeed_config=zero2"]
    started = [
        lab.cluster.start(host, *command, rank, *script, cwd=lab.folder, **COMMON)
        for rank, host in (("1", "n2"), ("0", "n1"))
    ]
    for process in started:
        code, output = finish(process, timeout=250)
        assert code == 0, output
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)


def test_pdsh_launcher_leaves_secrets_that_we_find(lab: Lab, alone: dict[int, float]) -> None:
    config_file = two_machines(lab, "pdsh")
    command = [ACCELERATE, "launch", "--config_file", config_file]
    script = [TRAIN, "--config", lab.run_yaml, "engine.deepspeed_config=zero2"]
    code, output = lab.run("n1", *command, *script, HF_TOKEN="hf_geheim")
    assert code == 0, output
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)
    [problem] = inspect_environment_file(lab.folder / ".deepspeed_env")
    assert "lets others read HF_TOKEN" in problem
