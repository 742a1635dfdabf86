"""`bigtrain.launchers.agent`: a pod's torchrun that waits for the save, and ends as its
processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bigtrain.errors import EXIT_STOPPED
from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import TRAIN, Inputs, start, wait
from tests.support.cluster import wait_until
from tests.support.worlds import ROOT, free_port

AGENT = [sys.executable, "-m", "bigtrain.launchers.agent"]
# Saves for as long as the test says.
WORKER = """
import os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: (here / f"asked-{rank}").touch())
(here / f"up-{rank}").touch()
while not (here / "go").exists():
    time.sleep(0.05)
(here / f"saved-{rank}").touch()
sys.exit(int((here / "go").read_text()))
"""


class Pod:
    """The agent with two processes, and what they have said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(WORKER)
        self.log = folder / "log"
        command = [*AGENT, "--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
        command += [str(folder / "worker.py"), str(folder)]
        with self.log.open("w") as log:
            self.agent = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        self.wait_for("up")

    def wait_for(self, name: str) -> None:
        """Until both processes have said `name`."""
        wait_until(name, lambda: all((self.folder / f"{name}-{r}").exists() for r in (0, 1)), 100)

    def go(self, code: int) -> None:
        (self.folder / "new").write_text(str(code))
        (self.folder / "new").rename(self.folder / "go")


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    started = Pod(tmp_path)
    family = [psutil.Process(started.agent.pid)]
    family += family[0].children(recursive=True)
    yield started
    for process in family:
        if process.is_running():
            process.kill()
    started.agent.wait()


@pytest.mark.distributed
def test_sigterm_is_handed_on_and_the_save_waited_for(pod: Pod) -> None:
    pod.agent.send_signal(signal.SIGTERM)
    pod.wait_for("asked")
    # torchrun's own end has not begun, which is a matter of 30 seconds.
    assert "SIGTERM" not in pod.log.read_text()
    assert pod.agent.poll() is None
    pod.go(EXIT_STOPPED)
    assert pod.agent.wait(100) == EXIT_STOPPED, pod.log.read_text()
    pod.wait_for("saved")


@pytest.mark.distributed
def test_it_ends_as_the_first_of_its_processes_did(pod: Pod) -> None:
    killed, _ = psutil.Process(pod.agent.pid).children()
    killed.kill()
    pod.go(0)
    assert pod.agent.wait(100) == 128 + signal.SIGKILL, pod.log.read_text()


@pytest.mark.slow
@pytest.mark.distributed
def test_it_ends_well(pod: Pod) -> None:
    pod.go(0)
    assert pod.agent.wait(100) == 0, pod.log.read_text()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_evicted_pod_saves_its_run(inputs: Inputs, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--config", inputs.run_yaml, f"output.directory={run}", "train.steps=1000000"]
    agent = [*AGENT[1:], "--nproc-per-node=2", "--master-port", str(free_port()), TRAIN]
    process = start([*agent, *words, "evaluation.every_steps=1000000"], home)
    assert process.stdout is not None
    for line in process.stdout:
        if "step 3/" in line:
            process.send_signal(signal.SIGTERM)  # to process 1 alone, as the kubelet does
            break
    finished = wait(process)
    assert finished.code == EXIT_STOPPED, finished.output
    step = checkpoints.list_steps(run)[-1]
    assert f"stopped by SIGTERM after step {step} of 1000000" in finished.output
    assert checkpoints.find_corruption(checkpoints.checkpoint_path(run, step), "all") is None


def test_sigterm_before_there_are_processes() -> None:
    """While the other nodes are waited for."""
    port = free_port()
    command = [*AGENT, "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    agent = subprocess.Popen([*command, "worker.py"], cwd=ROOT, stderr=subprocess.DEVNULL)
    own = psutil.Process(agent.pid)

    def listens() -> bool:
        return any(one.status == psutil.CONN_LISTEN for one in own.net_connections(kind="tcp"))

    try:
        wait_until("the agent serves the rendezvous", listens, 100)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(100) == 128 + signal.SIGTERM
    finally:
        agent.kill()
        agent.wait()
