"""Two real hosts under the deepspeed launcher: over ssh, and without it."""

from __future__ import annotations

import pytest

from bigtrain.launch.remote_environment import KEEP_ALIVE
from tests.cluster.conftest import COMMON, TRAIN, Lab
from tests.launch.conftest import metrics
from tests.support.cluster import BINARIES, finish, wait_until

ARGUMENTS = ("--config", "run.yaml", "--deepspeed_config", "zero1")


def write_hostfile(lab: Lab) -> None:
    (lab.folder / "hosts").write_text("n1 slots=1\nn2 slots=1\n")


def test_pdsh(lab: Lab, alone: dict[int, float]) -> None:
    write_hostfile(lab)
    bigtrain = [BINARIES / "python", "-m", "bigtrain.cli"]
    code, output = lab.run("n1", *bigtrain, "hostfile", "--check", "hosts")
    assert (code, output) == (0, "hosts: 2 hosts x 1 slots = 2 processes\n")
    code, output = lab.run(
        "n1", *bigtrain, "hostfile", "--environment", GLOO_SOCKET_IFNAME="eth0", HF_TOKEN="secret"
    )
    assert code == 0, output
    # pdsh itself hands on nothing but PYTHON*: the rest comes by this file.
    text = (lab.folder / ".deepspeed_env").read_text()
    assert "GLOO_SOCKET_IFNAME=eth0" in text
    assert "secret" not in text
    code, output = lab.run("n1", BINARIES / "deepspeed", "--hostfile", "hosts", TRAIN, *ARGUMENTS)
    assert code == 0, output
    assert "n2: " in output
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)


def test_no_ssh(lab: Lab, alone: dict[int, float]) -> None:
    write_hostfile(lab)
    common = ["--hostfile", "hosts", "--no_ssh", "--master_addr", "n1"]
    started = [
        lab.cluster.start(
            host,
            BINARIES / "deepspeed",
            *common,
            f"--node_rank={rank}",
            TRAIN,
            *ARGUMENTS,
            cwd=lab.folder,
            **COMMON,
        )
        for rank, host in ((1, "n2"), (0, "n1"))
    ]
    for process in started:
        code, output = finish(process, timeout=250)
        assert code == 0, output
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dead_host_does_not_keep_the_runner(lab: Lab) -> None:
    """n2's cable is pulled, so that nothing tells ssh; n1 fails by itself, as it does when its
    collective times out. Without the keep-alive the runner would wait for n2 for ever."""
    write_hostfile(lab)
    environment = {**COMMON, "PDSH_SSH_ARGS_APPEND": KEEP_ALIVE}
    bigtrain = [BINARIES / "python", "-m", "bigtrain.cli"]
    code, output = lab.run("n1", *bigtrain, "hostfile", "--environment")
    assert code == 0, output
    command = [BINARIES / "deepspeed", "--hostfile", "hosts", TRAIN]
    endless = ["train.steps=1000000", "evaluation.every_steps=1000000"]
    runner = lab.cluster.start("n1", *command, *ARGUMENTS, *endless, cwd=lab.folder, **environment)
    figures = lab.folder / "run" / "metrics.jsonl"
    try:
        wait_until("some steps", lambda: figures.exists() and figures.read_text(), 250)
        lab.cluster.link("n2", "down")
        for process in lab.cluster.processes("n1", "train.py --local_rank"):
            process.kill()
        code, output = finish(runner, timeout=120)
        assert code not in (0, None), output
    finally:
        for host in ("n1", "n2"):  # what the runner could not reach
            for process in lab.cluster.processes(host, "train.py"):
                process.kill()
