"""Checkpoints in memory of two hosts with copies on the partner: a host is lost, or comes back with
empty memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import TRAIN, Lab
from tests.cluster.test_elastic import Elastic
from tests.launch.conftest import Inputs, launch, metrics
from tests.support.cluster import wait_until

STEPS = 300
SETTINGS = [
    f"train.steps={STEPS}",
    "checkpoint.every_steps=null",
    "checkpoint.memory.every_steps=1",
    "checkpoint.memory.copies=1",
    "evaluation.every_steps=null",
    "optimizer.lr=0.001",
    "output.export=false",
    "engine.deepspeed_config=zero1",
    "watchdog.timeout_seconds=10",
    "watchdog.slow_timeout_seconds=60",
]
# Between a world of two and of one, rounding differs, and the difference grows from step to step.
LOSS_TOLERANCE = 1e-3


@pytest.fixture
def run(lab: Lab) -> Iterator[Elastic]:
    """A run that trains on n1 and n2 and has saved in their memory; n0 serves the rendezvous."""
    elastic = Elastic(lab, SETTINGS)
    _, served = elastic.start("n0", "serve")
    wait_until("n0 serves", lambda: "serving on port 29400" in served.read_text())
    for host in ("n1", "n2"):
        elastic.start(host)
    wait_until("two hosts train", lambda: elastic.world_size() == 2 and elastic.steps() > 10, 150)
    yield elastic
    for log in sorted(lab.folder.glob("*.log")):  # shown where the test has failed
        print(f"== {log.name}\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def unbroken(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss by step of one process that nobody disturbs."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    settings = [one for one in SETTINGS if "memory" not in one]
    arguments = ["--config", inputs.run_yaml, *settings, f"output.directory={run}"]
    finished = launch([TRAIN, *arguments], inputs.run_yaml.parent)
    assert finished.code == 0, finished.output
    return metrics(run)


def in_memory(lab: Lab, host: str) -> list[str]:
    """Names in /dev/shm of a host that bigtrain gave (agents that earlier tests on this host killed
    leave semaphores of Python's)."""
    _, output = lab.run(host, "find", "/dev/shm", "-name", "bigtrain-*")
    return output.splitlines()


def assert_resumed_and_ended(run: Elastic, unbroken: dict[int, float], steps: int) -> None:
    """The run went on from memory at a step that it had reached, and its steps stand once each."""
    wait_until("the run ends", lambda: f"checkpoint of step {STEPS}: " in run.story(), 200)
    [(step, directory)] = re.findall(r"resumed at step (\d+) from (\S+)", run.story())
    assert directory.startswith("/dev/shm/")
    assert 0 < int(step) <= steps + 2
    losses = metrics(run.run)
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(unbroken, abs=LOSS_TOLERANCE)
    [saved] = (run.run / "checkpoints").glob("step-*")
    assert saved == Path(run.run, "checkpoints", f"step-{STEPS:08d}")
    wait_until("n1 has no file in memory", lambda: not in_memory(run.lab, "n1"))


@pytest.mark.timeout(600)
def test_a_lost_host_leaves_its_part_with_its_partner(
    run: Elastic, unbroken: dict[int, float]
) -> None:
    steps = run.steps()
    run.lab.cluster.link("n2", "down")
    for process in run.lab.cluster.processes("n2", "bigtrain.launchers.agent"):
        process.kill()  # and with it its ranks
    assert_resumed_and_ended(run, unbroken, steps)
    assert run.world_size() == 1


@pytest.mark.timeout(600)
def test_a_host_that_is_back_with_empty_memory_gets_its_part(
    run: Elastic, unbroken: dict[int, float]
) -> None:
    [first], [second] = run.processes("n1"), run.processes("n2")
    first.kill()
    second.kill()
    steps = run.steps()
    assert in_memory(run.lab, "n2")
    run.lab.run("n2", "sh", "-c", "rm -r /dev/shm/bigtrain-*")
    assert_resumed_and_ended(run, unbroken, steps)
    assert run.world_size() == 2
    wait_until("n2 has no file in memory", lambda: not in_memory(run.lab, "n2"))
