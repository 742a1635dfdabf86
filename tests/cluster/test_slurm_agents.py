"""`bigtrain launch slurm --spares`: one srun with an agent per node; ranks, agents and nodes are
lost, and the job continues."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import psutil
import pytest

from bigtrain.cli import main as bigtrain
from tests.cluster.conftest import TRAIN, Lab, Submit
from tests.cluster.test_elastic import Elastic
from tests.cluster.test_slurm import completions, ended, state, told
from tests.launch.conftest import Inputs, launch, launcher, metrics
from tests.support.cluster import Cluster, cluster, wait_until, why_not

STEPS = 700
RUN = [
    *(f"train.steps={STEPS}", "checkpoint.every_steps=null", "checkpoint.memory.every_steps=1"),
    *("checkpoint.memory.copies=1", "evaluation.every_steps=null", "optimizer.lr=0.001"),
    *("output.export=false", "engine.deepspeed_config=zero1", "watchdog.timeout_seconds=10"),
    "watchdog.slow_timeout_seconds=60",
]
NODES = ("n1", "n2", "n3")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """n0 (Slurm's controller), and three nodes."""
    reason = why_not(slurm=True, ssh=False)
    if reason is not None:
        pytest.skip(reason)
    state = tmp_path_factory.mktemp("cluster") / "state"
    with cluster(state, 4, slurm=True, ssh=False, subnet="10.78.0") as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss by step of two processes that nobody disturbs."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    settings = [one for one in RUN if "memory" not in one]
    two = [*launcher("torchrun"), "--config", inputs.run_yaml, *settings]
    finished = launch([*two, f"output.directory={run}"], inputs.run_yaml.parent)
    assert finished.code == 0, finished.output
    return metrics(run)


class Job(Elastic):
    """A job of three nodes, of which one idles."""

    def __init__(self, lab: Lab, submit: Submit, *options: str) -> None:
        self.lab, self.run = lab, lab.folder / "run"
        script = lab.folder / "job.sbatch"
        words = ["launch", "slurm", "--config", str(lab.run_yaml), "--gpus-per-node", "0"]
        words += ["--nodes", "2", "--spares", "1", "--time", "12", "--save-seconds", "60"]
        words += ["--sbatch", "mem=1000", "--sbatch", "cpus-per-task=1", "--output", str(script)]
        assert bigtrain([*words, *RUN, *options]) == 0
        self.job, self.log = submit(script, [], [])
        wait_until("two nodes train", self.trains, 250)
        wait_until("one is a spare", lambda: "this one is a spare" in self.log.read_text(), 60)

    def trains(self) -> bool:
        return self.world_size() == 2 and self.steps() > 10

    def training_nodes(self) -> list[str]:
        return [name for name in NODES if self.lab.cluster.ranks(name)]

    def batch_node(self) -> str:
        """The node of the script and the rendezvous."""
        return next(
            name
            for name in NODES
            if self.lab.cluster.processes(name, "bigtrain.launchers.rendezvous_server")
        )

    def lose(self, process: psutil.Process) -> None:
        """Kill `process`; two ranks continue from the memory of their hosts."""
        story, steps = self.story(), self.steps()
        # Steps are shorter than a checkpoint in memory takes on a busy machine.
        wait_until("checkpoints of these steps", lambda: self.steps() >= steps + 20, 60)
        process.kill()
        assert self.wait_for_resume(2, story) >= steps - 2
        resumed = re.findall(r"resumed at step \d+ from (\S+)", self.story().removeprefix(story))
        assert resumed[0].startswith("/dev/shm/")

    def ends_well(self, undisturbed: dict[int, float]) -> None:
        """It was one job all the time, and its ranks have computed what others would have."""
        assert ended(self.lab, self.job, self.log) == "COMPLETED", self.log.read_text()
        assert told(self.lab, self.job, "Restarts") == "0"
        assert completions(self.lab, self.job) == ["COMPLETED 0:0"]
        assert "train.sbatch: complete" in self.log.read_text()
        assert metrics(self.run) == undisturbed


def test_a_rank_and_an_agent_are_killed(
    lab: Lab, submit: Submit, undisturbed: dict[int, float]
) -> None:
    job = Job(lab, submit)
    before = job.training_nodes()
    [rank] = lab.cluster.ranks(before[0])
    job.lose(rank)
    assert job.training_nodes() == before
    [agent] = lab.cluster.processes(before[1], "-m bigtrain.launchers.agent")
    job.lose(agent)
    assert set(job.training_nodes()) == set(NODES) - {before[1]}
    job.ends_well(undisturbed)
    environment = json.loads((job.run / "environment.json").read_text())
    assert sorted(environment["hosts"]) == sorted(set(NODES) - {before[1]})


def test_a_node_fails(lab: Lab, submit: Submit) -> None:
    """Slurm takes it for down, and neither ends the step nor requeues the job."""
    job = Job(lab, submit, "train.steps=4000")
    [lost, *_] = [name for name in job.training_nodes() if name != job.batch_node()]
    story, steps = job.story(), job.steps()
    lab.cluster.link(lost, "down")
    assert job.wait_for_resume(2, story) >= steps - 2

    def is_down() -> bool:
        return "down" in lab.run("n0", "sinfo", "-h", "-n", lost, "-o", "%T")[1]

    wait_until("Slurm takes the node for down", is_down, 200)
    steps = job.steps()
    wait_until("the run continues", lambda: job.steps() > steps + 20, 60)
    assert state(lab, job.job) == "RUNNING"
    assert told(lab, job.job, "Restarts") == "0"
    logged = list(metrics(job.run))  # once: the run goes on
    assert logged == list(range(1, len(logged) + 1))


def test_a_run_with_spares_outlives_its_time_limit(
    lab: Lab, submit: Submit, undisturbed: dict[int, float]
) -> None:
    """Its ranks save, and are started by the requeued job, not by their agents."""
    job = Job(lab, submit)
    code, output = lab.run("n0", "scancel", "--batch", "--signal=USR1", job.job)
    assert code == 0, output
    wait_until("it is requeued", lambda: "start 2: " in job.log.read_text(), 250)
    story = job.log.read_text()
    assert story.count("saved; back into the queue") == 1
    assert story.count("stopped by SIGUSR1 after step") == 1
    assert ended(lab, job.job, job.log) == "COMPLETED", job.log.read_text()
    assert told(lab, job.job, "Restarts") == "1"
    assert metrics(job.run) == undisturbed
    assert not (job.run / "requeue").exists()
    assert not any(lab.cluster.processes(name, str(TRAIN)) for name in NODES)
