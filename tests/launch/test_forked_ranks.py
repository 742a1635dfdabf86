"""Ranks that `bigtrain.launchers.agent --fork` forks: restarts without imports, exit codes and
signals, and none outlives its agent."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.diagnostics.start_times import IMPORTS
from tests.launch.conftest import TRAIN, Inputs
from tests.support.cluster import wait_until
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

FORK = ["-m", "bigtrain.launchers.agent", "--fork", "bigtrain.forked_rank"]
FORK += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


class Forked:
    """An agent that has forked two ranks of a run."""

    def __init__(self, inputs: Inputs, folder: Path, *settings: str) -> None:
        self.run, self.log = folder / "run", folder / "log"
        command = [*FORK, "--nproc-per-node=2", "--max-restarts=3", str(TRAIN)]
        command += ["--config", str(inputs.run_yaml), f"output.directory={self.run}"]
        command += ["train.steps=100000", "checkpoint.every_steps=5", "evaluation.every_steps=null"]
        with self.log.open("w") as log:
            self.agent = psutil.Popen(
                [sys.executable, *command, *settings], stdout=log, stderr=log, cwd=ROOT
            )

    def ranks(self) -> dict[str, psutil.Process]:
        """Processes of the ranks by name."""
        processes_by_name = {}
        for one in self.agent.children(recursive=True):
            try:
                if one.status() != psutil.STATUS_ZOMBIE and one.name().startswith("rank-"):
                    processes_by_name[one.name()] = one
            except psutil.Error:  # it has ended
                continue
        return processes_by_name

    def story(self) -> str:
        path = self.run / "log.txt"
        return path.read_text() if path.exists() else ""

    def wait_for_steps(self, num_starts: int) -> None:
        """Until a launch of that number has made steps and one was saved."""

        def trains() -> bool:
            text = self.story()
            assert self.agent.poll() is None, "the agent has ended"
            return len(starts(text)) >= num_starts and bool(checkpoints.list_steps(self.run))

        try:
            wait_until(f"start {num_starts}", trains, 200)
        except AssertionError:
            raise AssertionError(self.log.read_text()[-6000:]) from None


def starts(story: str) -> list[float]:
    """Seconds of imports and checks of each launch."""
    return [float(one) for one in re.findall(rf"{IMPORTS} ([\d.]+)", story)]


@pytest.fixture
def forked(inputs: Inputs, tmp_path: Path) -> Iterator[Forked]:
    """An agent, and at the end of the test nothing of its family, which removes its semaphores."""
    one = Forked(inputs, tmp_path)
    yield one
    family = one.agent.children(recursive=True) if one.agent.is_running() else []
    if one.agent.is_running():
        one.agent.kill()
    one.agent.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    for process in alive:
        process.kill()


@pytest.mark.slow
def test_a_killed_rank_restarts_without_imports(forked: Forked) -> None:
    """And the ranks end with a killed agent."""
    forked.wait_for_steps(1)
    ranks = forked.ranks()
    assert sorted(ranks) == ["rank-0", "rank-1"]
    pids = [one.pid for one in ranks.values()]
    [server] = {one.ppid() for one in ranks.values()}
    ranks["rank-1"].kill()
    forked.wait_for_steps(2)
    story = forked.story()
    assert re.search(r"resumed at step \d+ from", story)
    restarted = forked.ranks()
    assert sorted(restarted) == ["rank-0", "rank-1"]
    assert {one.pid for one in restarted.values()}.isdisjoint(pids)
    assert {one.ppid() for one in restarted.values()} == {server}  # which has imported all
    forked.agent.kill()
    _, alive = psutil.wait_procs(list(restarted.values()), timeout=30)
    assert alive == []


@pytest.mark.slow
def test_the_end_of_a_run_is_code_0_and_an_error_is_code_2(inputs: Inputs, tmp_path: Path) -> None:
    one = Forked(inputs, tmp_path, "train.steps=6", "output.export=false")
    assert one.agent.wait(200) == 0, one.log.read_text()
    assert checkpoints.list_steps(one.run)[-1] == 6
    wrong = [*FORK, "--nproc-per-node=1", str(TRAIN), "--config", str(inputs.run_yaml)]
    command = [sys.executable, *wrong, "train.stepz=6"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 2, finished.stderr
    assert "stepz" in finished.stderr


CUDA = """
import sys
from unittest import mock
import torch
from bigtrain.launchers import fork_ranks
script = sys.argv[1]
with mock.patch.object(torch.cuda, "_is_in_bad_fork", lambda: True):
    fork_ranks.run_rank("bigtrain.forked_rank", script, "7")
"""


@pytest.mark.slow
def test_where_cuda_was_initialized_a_rank_is_a_new_process(tmp_path: Path) -> None:
    """The module is not used, and the script's code is the rank's."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('new process', sys.argv[1]); sys.exit(int(sys.argv[1]))")
    finished = subprocess.run(
        [sys.executable, "-c", CUDA, script],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 7, finished.stderr
    assert "new process 7" in finished.stdout
    assert "so this rank is a new process" in finished.stderr
