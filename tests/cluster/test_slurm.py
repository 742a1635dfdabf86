"""Real Slurm: two nodes, sbatch, what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import Lab, Submit
from tests.launch.conftest import metrics
from tests.support.cluster import wait_until
from tests.support.worlds import ROOT

SBATCH = ROOT / "slurm" / "train.sbatch"
TWO_NODES = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=1000", "--time=10"]
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def state(lab: Lab, job: str) -> str:
    """Slurm's word for the state of `job`."""
    _, output = lab.run("n0", "scontrol", "show", "job", job)
    return next(word for word in output.split() if word.startswith("JobState=")).split("=")[1]


def ended(lab: Lab, job: str, log: Path, timeout: float = 200) -> str:
    """The final state of `job`, once it has one."""
    try:
        wait_until("the job ends", lambda: state(lab, job) in FINAL, timeout)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text() if log.exists() else 'no log'}") from None
    return state(lab, job)


def test_two_nodes_compute_what_one_process_does(
    lab: Lab, submit: Submit, alone: dict[int, float]
) -> None:
    job, log = submit(SBATCH, TWO_NODES, [lab.run_yaml, "--deepspeed_config", "zero2"])
    assert ended(lab, job, log) == "COMPLETED", log.read_text()
    assert "n[1-2], 1 processes on each of 2 nodes" in log.read_text()
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)
    completed = (lab.cluster.state / "jobcomp.log").read_text()
    assert f"JobId={job} " in completed
    assert "JobState=COMPLETED" in completed


def test_wrong_run_fails_before_a_process_starts(lab: Lab, submit: Submit) -> None:
    job, log = submit(SBATCH, TWO_NODES, [lab.run_yaml, "batch.micro_samples=3"])
    assert ended(lab, job, log) == "FAILED"
    assert "batch.global_samples = 8: must be a multiple of" in log.read_text()
    assert "srun" not in log.read_text()
    assert not (lab.folder / "run").exists()


def test_no_run_named(lab: Lab, submit: Submit) -> None:
    job, log = submit(SBATCH, TWO_NODES, [])
    assert ended(lab, job, log) == "FAILED"
    assert log.read_text().startswith("train.sbatch: no run is named: sbatch slurm/train.sbatch")
