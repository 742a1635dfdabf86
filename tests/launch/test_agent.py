"""`bigtrain.launchers.agent`: a pod's torchrun that waits for the save, and ends as its
processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bigtrain.errors import EXIT_STOPPED
from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import TRAIN, Inputs, start, wait
from tests.support.cluster import wait_until
from tests.support.lives import shared_server
from tests.support.worlds import ROOT, free_port

AGENT = [sys.executable, "-m", "bigtrain.launchers.agent"]
LIMIT_SECONDS = 100.0
# Saves for as long as the test says.
WORKER = """
import os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: (here / f"asked-{rank}").touch())
(here / f"agent-{rank}").write_text(str(os.getppid()))
(here / f"up-{rank}").touch()
while not (here / "go").exists():
    time.sleep(0.05)
(here / f"saved-{rank}").touch()
sys.exit(int((here / "go").read_text()))
"""


class Pod:
    """The agent, forked from a process that has imported it, with two processes, and what they
    have said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(WORKER)
        command = [*AGENT[1:], "--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
        command += [str(folder / "worker.py"), str(folder)]
        self.output = ""
        self.codes: list[int] = []
        self.life = threading.Thread(target=self._live, args=(command,))
        self.life.start()
        self.wait_for("up")
        self.agent = psutil.Process(int((folder / "agent-0").read_text()))

    def _live(self, command: list[str]) -> None:
        self.codes, self.output = shared_server().live(
            [], world_size=1, script=command, limit_seconds=LIMIT_SECONDS
        )

    def written(self) -> str:
        """Return the output up to now."""
        server = shared_server()
        return (server.directory / f"life-{server.num_lives:04d}.txt").read_text()

    def end(self) -> int:
        """Wait until the agent has ended; return its exit code."""
        self.life.join()
        [code] = self.codes
        return code

    def wait_for(self, name: str) -> None:
        """Until both processes have said `name`."""
        wait_until(name, lambda: all((self.folder / f"{name}-{r}").exists() for r in (0, 1)), 100)

    def go(self, code: int) -> None:
        (self.folder / "new").write_text(str(code))
        (self.folder / "new").rename(self.folder / "go")


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    started = Pod(tmp_path)
    family = [started.agent, *started.agent.children(recursive=True)]
    yield started
    for process in family:
        if process.is_running():
            process.kill()
    started.life.join()


@pytest.mark.distributed
def test_sigterm_is_handed_on_and_the_save_waited_for(pod: Pod) -> None:
    pod.agent.send_signal(signal.SIGTERM)
    pod.wait_for("asked")
    # torchrun's own end has not begun, which is a matter of 30 seconds.
    assert "SIGTERM" not in pod.written()
    assert pod.life.is_alive()
    pod.go(EXIT_STOPPED)
    assert pod.end() == EXIT_STOPPED, pod.output
    pod.wait_for("saved")


@pytest.mark.distributed
def test_it_ends_as_the_first_of_its_processes_did(pod: Pod) -> None:
    killed, _ = pod.agent.children()
    killed.kill()
    pod.go(0)
    assert pod.end() == 128 + signal.SIGKILL, pod.output


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


@pytest.mark.slow
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
