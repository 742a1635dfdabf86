"""Two and three real hosts under the deepspeed launcher: pdsh, mpirun, and neither."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version

import pytest

from bigtrain.launchers.deepspeed_env import KEEP_ALIVE
from tests.cluster.conftest import COMMON, TRAIN, Lab
from tests.launch.conftest import metrics
from tests.support.cluster import BINARIES, SYSTEM_PATH, finish, wait_until
from tests.support.worlds import ROOT

ARGUMENTS = ("--config", "run.yaml", "--deepspeed_config", "zero1")


BIGTRAIN = (BINARIES / "python", "-m", "bigtrain.cli")


def write_hostfile(lab: Lab, *names: str) -> None:
    lines = (f"{name} slots=1\n" for name in names or ("n1", "n2"))
    (lab.folder / "hosts").write_text("".join(lines))


# In place of train.py: writes down what it was given.
GIVEN = """
import json, os, pathlib, socket, sys
given = {"environment": dict(os.environ), "arguments": sys.argv[1:], "host": socket.gethostname()}
pathlib.Path(f"given-{os.environ['RANK']}.json").write_text(json.dumps(given))
"""


@pytest.mark.slow
def test_pdsh_starts_the_ranks_of_three_hosts(lab: Lab) -> None:
    """Of unequal slots, with the variables that `.deepspeed_env` names."""
    (lab.folder / "hosts").write_text("n1 slots=1\nn2 slots=2\nn0 slots=1\n")
    (lab.folder / "given.py").write_text(GIVEN)
    code, output = lab.run(
        "n1", *BIGTRAIN, "hostfile", "--environment", GLOO_SOCKET_IFNAME="eth0", HF_TOKEN="secret"
    )
    assert code == 0, output
    command = [BINARIES / "deepspeed", "--hostfile", "hosts", "given.py", *ARGUMENTS]
    code, output = lab.run("n1", *command)
    assert code == 0, output
    given = [json.loads((lab.folder / f"given-{rank}.json").read_text()) for rank in range(4)]
    environments = [each["environment"] for each in given]
    places = [
        (each["host"], env["LOCAL_RANK"]) for each, env in zip(given, environments, strict=True)
    ]
    # DeepSpeed's local rank is the rank modulo the processes of its host.
    assert places == [("n1", "0"), ("n2", "1"), ("n2", "0"), ("n0", "0")]
    for each, environment in zip(given, environments, strict=True):
        local_rank = environment["LOCAL_RANK"]
        assert each["arguments"] == [f"--local_rank={local_rank}", *ARGUMENTS]
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
        assert "HF_TOKEN" not in environment
        assert environment["WORLD_SIZE"] == "4"
        assert environment["MASTER_ADDR"] == lab.cluster.hosts["n1"]


@pytest.mark.slow
def test_pdsh_with_three_hosts(lab: Lab, alone: dict[int, float]) -> None:
    """Of unequal slots; a tensor-parallel group on two hosts is named."""
    (lab.folder / "hosts").write_text("n1 slots=1\nn2 slots=2\nn0 slots=1\n")
    code, output = lab.run("n1", *BIGTRAIN, "hostfile", "--check", "hosts")
    assert code == 0, output
    assert output.splitlines()[:2] == [
        "hosts: 3 hosts = 4 processes",
        "  n2 has slots=2, most hosts 1",
    ]
    code, output = lab.run(
        "n1", *BIGTRAIN, "hostfile", "--environment", GLOO_SOCKET_IFNAME="eth0", HF_TOKEN="secret"
    )
    assert code == 0, output
    # pdsh itself hands on nothing but PYTHON*: the rest comes by this file.
    text = (lab.folder / ".deepspeed_env").read_text()
    assert "GLOO_SOCKET_IFNAME=eth0" in text
    assert "secret" not in text
    command = [BINARIES / "deepspeed", "--hostfile", "hosts", TRAIN, *ARGUMENTS]
    code, output = lab.run("n1", *command, "parallel.tensor=2")
    assert code == 0, output
    assert "n2: " in output
    assert "n0: " in output
    assert "2 tensor-parallel groups are on several hosts (ranks 0, 1 on n1, n2)" in output
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_openmpi_with_three_hosts(lab: Lab, alone: dict[int, float]) -> None:
    """The main process is on n1, as mpirun is, wherever n1 stands in the file."""
    if shutil.which("mpirun", path=SYSTEM_PATH) is None:
        pytest.skip("mpirun is not installed: make test-deps")
    write_hostfile(lab, "n2", "n1", "n0")
    command = [BINARIES / "deepspeed", "--hostfile", "hosts", "--launcher", "openmpi"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # mpirun hands on what -x and .deepspeed_env name, and no more.
    code, output = lab.run("n1", *BIGTRAIN, "hostfile", "--environment")
    assert code == 0, output
    command += ["--launcher_args", "-x MASTER_ADDR=n2 -x MASTER_PORT=29512", TRAIN, *ARGUMENTS]
    code, output = lab.run("n1", *command, **as_root)
    assert code == 2, output
    assert "MASTER_ADDR = n2, the rendezvous address, is not n1, where mpirun" in output
    assert not (lab.folder / "run").exists()
    command[command.index(TRAIN) - 1] = "-x MASTER_ADDR=n1 -x MASTER_PORT=29512"
    code, output = lab.run("n1", *command, **as_root)
    assert code == 0, output
    assert metrics(lab.folder / "run") == pytest.approx(alone, abs=1e-5)
    assert json.loads((lab.folder / "run" / "environment.json").read_text())["host"] == "n1"


@pytest.mark.slow
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
def test_a_host_that_nobody_knows_is_named_by_the_run(lab: Lab) -> None:
    write_hostfile(lab, "n1", "n9")
    command = [BINARIES / "deepspeed", "--hostfile", "hosts", TRAIN, *ARGUMENTS]
    code, output = lab.run("n1", *command, "watchdog.rendezvous_timeout_seconds=5")
    assert code != 0, output
    assert "1 of 2 ranks have not joined: n9 (rank 1); joined: n1 (rank 0)" in output
    assert not (lab.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dead_host_does_not_keep_the_runner(lab: Lab) -> None:
    """n2's cable is pulled: nothing tells n1, whose watchdog ends it, and nothing tells ssh.

    Without the keep-alive the runner would wait for n2 for ever.
    """
    write_hostfile(lab)
    assert "ServerAliveInterval=10 " in KEEP_ALIVE
    sooner = KEEP_ALIVE.replace("Interval=10 ", "Interval=2 ")
    environment = {**COMMON, "PDSH_SSH_ARGS_APPEND": sooner}
    code, output = lab.run("n1", *BIGTRAIN, "hostfile", "--environment")
    assert code == 0, output
    command = [BINARIES / "deepspeed", "--hostfile", "hosts", TRAIN]
    endless = ["train.steps=1000000", "evaluation.every_steps=1000000"]
    endless += ["checkpoint.every_steps=1000000", "watchdog.timeout_seconds=5"]
    runner = lab.cluster.start("n1", *command, *ARGUMENTS, *endless, cwd=lab.folder, **environment)
    figures = lab.folder / "run" / "metrics.jsonl"
    some = 2000  # bytes; past the first step, for which the limit is the long one
    wait_until("steps", lambda: figures.exists() and figures.stat().st_size > some, 250)
    lab.cluster.link("n2", "down")
    code, output = finish(runner, timeout=120)
    assert code not in (0, None), output
    assert "rank 1 on n2 does not respond" in output


@pytest.mark.slow
def test_a_host_with_another_torch_is_named_before_training(lab: Lab) -> None:
    write_hostfile(lab)
    other = "/run/versions/torch-2.99.0.dist-info"  # /run belongs to each host
    metadata = "Metadata-Version: 2.1\\nName: torch\\nVersion: 2.99.0\\n"
    script = f"mkdir -p {other} && printf '{metadata}' > {other}/METADATA"
    code, output = lab.run("n2", "sh", "-c", script)
    assert code == 0, output
    command = [BINARIES / "deepspeed", "--hostfile", "hosts", "--no_ssh", "--master_addr", "n1"]
    paths = {"n2": f"{ROOT}:/run/versions", "n1": str(ROOT)}
    started = [
        lab.cluster.start(
            host,
            *command,
            f"--node_rank={rank}",
            TRAIN,
            *ARGUMENTS,
            cwd=lab.folder,
            **{**COMMON, "PYTHONPATH": paths[host]},
        )
        for rank, host in ((1, "n2"), (0, "n1"))
    ]
    code, output = finish(started[1], timeout=250)
    assert code != 0, output
    assert "train.py: hosts have different versions" in output
    assert f"n2: torch 2.99.0 (others: {version('torch')})" in output
    assert not (lab.folder / "run").exists()
