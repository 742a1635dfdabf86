"""torchrun on three hosts: an agent is killed, a replacement joins, a cable is pulled; one run. And
a spare that takes the place of a lost host."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from bigtrain.cli import main as bigtrain
from bigtrain.errors import EXIT_FAULTY_HOST
from tests.cluster.conftest import COMMON, TRAIN, Lab
from tests.launch.conftest import Inputs, launch, launcher, metrics
from tests.support.cluster import wait_until

STEPS, SAVE_EVERY = 90, 10
OVERRIDES = [
    f"train.steps={STEPS}",
    f"checkpoint.every_steps={SAVE_EVERY}",
    "evaluation.every_steps=100000",
    "optimizer.lr=0.001",
    "output.export=true",
    "engine.deepspeed_config=zero1",
    # What ends processes whose peer is behind a cut cable; its connection stays open.
    "watchdog.timeout_seconds=10",
    "watchdog.slow_timeout_seconds=60",
]


class Elastic:
    """A run under torchrun on the hosts of `lab`, and what it has written so far."""

    def __init__(
        self,
        lab: Lab,
        overrides: Sequence[str] = OVERRIDES,
        nodes: str = "1:3",
        options: Sequence[str] = (),
    ) -> None:
        self.lab = lab
        self.run = lab.folder / "run"
        self.script = lab.folder / "run.torchrun.sh"
        words = ["launch", "torchrun", "--config", str(lab.run_yaml), "--nodes", nodes]
        words += ["--gpus-per-node", "0", "--rendezvous", "n0:29400", "--output", str(self.script)]
        words += ["--last-call-timeout", "6", *options]
        assert bigtrain([*words, *overrides]) == 0

    def start(self, host: str, *words: str) -> tuple[psutil.Popen, Path]:
        """Start the script on `host`; returns the process and its log."""
        log = self.lab.folder / f"{host}{'-'.join(words)}.log"
        log.touch()
        command = f"exec bash {self.script} {' '.join(words)} >> {log} 2>&1"
        folder = self.lab.folder
        return self.lab.cluster.start(host, "sh", "-c", command, cwd=folder, **COMMON), log

    def processes(self, host: str) -> list[psutil.Process]:
        """The processes that train on `host`."""
        return self.lab.cluster.ranks(host)

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        names = [path.name for path in (self.run / "checkpoints").glob("step-????????")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def story(self) -> str:
        """What the run has said so far."""
        path = self.run / "log.txt"
        return path.read_text() if path.exists() else ""

    def world_size(self) -> int:
        """Processes of the newest start."""
        path = self.run / "environment.json"
        if not path.exists():
            return 0
        return int(json.loads(path.read_text())["topology"]["world_size"])

    def wait_for_resume(self, size: int, said_before: str) -> int:
        """Until `size` processes have gone on for some steps; returns the step they went on at."""

        def resumed() -> int | None:
            said = self.story().removeprefix(said_before)
            steps = re.findall(r"resumed at step (\d+)", said)
            return int(steps[0]) if steps and self.world_size() == size else None

        def gone_on() -> bool:
            step = resumed()
            return step is not None and self.steps() >= step + 5

        wait_until(f"{size} processes go on", gone_on, 150)
        step = resumed()
        assert step is not None
        return step


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended; its agent may not have taken notice yet."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def is_asked_to_end(process: psutil.Process) -> bool:
    """Whether a SIGTERM waits for a suspended process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    pending = int(status.split("ShdPnd:")[1].split()[0], 16)
    return bool(pending >> (signal.SIGTERM - 1) & 1)


def pulse(process: psutil.Process, elastic: Elastic) -> None:
    """Let a suspended process, and with it the run, go on for a step or two, then for 3 s not."""
    steps = elastic.steps()
    process.resume()
    wait_until("a step", lambda: elastic.steps() > steps or not lives(process), 60)
    if lives(process):
        process.suspend()
        psutil.wait_procs([process], timeout=3)


@pytest.fixture
def elastic(lab: Lab) -> Iterator[Elastic]:
    yield Elastic(lab)
    for log in sorted(lab.folder.glob("*.log")):  # shown where the test has failed
        print(f"== {log.name}\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def unbroken(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run by one process that nobody disturbs."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    arguments = ["--config", inputs.run_yaml, *OVERRIDES, f"output.directory={run}"]
    finished = launch([TRAIN, *arguments], inputs.run_yaml.parent)
    assert finished.code == 0, finished.output
    return run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_spare_takes_the_place_of_a_lost_host(lab: Lab, tmp_path: Path) -> None:
    """The world and its layout stay, so the end is bit-identical to an undisturbed run's."""
    plain = [*OVERRIDES, "train.steps=600", "checkpoint.every_steps=300"]
    settings = [*plain, "checkpoint.memory.every_steps=1", "checkpoint.memory.copies=1"]
    elastic = Elastic(lab, settings, "2", ["--spares", "1"])
    _, served = elastic.start("n0", "serve")
    wait_until("n0 serves", lambda: "serving on port 29400" in served.read_text())
    agents = {host: elastic.start(host) for host in ("n1", "n2")}
    wait_until("two hosts train", lambda: elastic.world_size() == 2 and elastic.steps() > 5, 150)
    agents["n0"] = elastic.start("n0")
    wait_until("n0 is a spare", lambda: "this one is a spare" in agents["n0"][1].read_text(), 60)
    story, steps = elastic.story(), elastic.steps()
    lab.cluster.link("n2", "down")
    for process in lab.cluster.processes("n2", "bigtrain.launchers.agent"):
        process.kill()  # and with it its ranks
    assert elastic.wait_for_resume(2, story) >= steps - 2
    for host in ("n0", "n1"):
        agent, log = agents[host]
        assert agent.wait(200) == 0, log.read_text()
    environment = json.loads((elastic.run / "environment.json").read_text())
    assert sorted(environment["hosts"]) == ["n0", "n1"]

    undisturbed = tmp_path / "undisturbed"
    two = [*launcher("torchrun"), "--config", lab.run_yaml, *plain]
    finished = launch([*two, f"output.directory={undisturbed}"], lab.run_yaml.parent)
    assert finished.code == 0, finished.output
    assert metrics(elastic.run) == metrics(undisturbed)
    files = [run / "hf" / "model.safetensors" for run in (elastic.run, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_while_hosts_come_and_go(elastic: Elastic, unbroken: Path) -> None:
    lab = elastic.lab
    _, served = elastic.start("n0", "serve")
    wait_until("n0 serves", lambda: "serving on port 29400" in served.read_text())
    agents = {host: elastic.start(host) for host in ("n0", "n1", "n2")}
    wait_until("three hosts save", lambda: elastic.world_size() == 3 and elastic.newest(), 150)

    # The agent of the main process; its process goes with it.
    [agent] = lab.cluster.processes("n0", "bigtrain.launchers.agent")
    story, newest = elastic.story(), elastic.newest()
    agent.kill()
    assert elastic.wait_for_resume(2, story) >= newest

    # A step now and then until the replacement is noticed, however long that takes: so slow a run
    # is not over before, and is none that hangs.
    [stopped] = elastic.processes("n1")
    story, steps = elastic.story(), elastic.steps()
    agents["n0"] = elastic.start("n0")

    def is_asked() -> bool:
        pulse(stopped, elastic)
        return not lives(stopped) or is_asked_to_end(stopped)

    wait_until("n1's agent asks it to save", is_asked, 120)
    if lives(stopped):
        stopped.resume()
    step = elastic.wait_for_resume(3, story)
    assert step >= steps
    assert f"stopped by SIGTERM after step {step} " in elastic.story()  # saved where it stood

    story, newest = elastic.story(), elastic.newest()
    cut_off = elastic.processes("n1")
    lab.cluster.link("n1", "down")
    assert elastic.wait_for_resume(2, story) >= newest
    assert re.search(r"no heartbeat from \S+: lost", agents["n0"][1].read_text())
    wait_until("n1's process ends as well", lambda: not any(map(lives, cut_off)), 60)
    for host in ("n0", "n2"):
        agent, log = agents[host]
        assert agent.wait(120) == 0, log.read_text()

    # Steps stand once each and have the samples that they have without a failure.
    for key in ("loss", "samples", "lr"):
        there = metrics(elastic.run, key)
        assert list(there) == list(range(1, STEPS + 1))
        assert there == pytest.approx(metrics(unbroken, key), abs=1e-5)
    weights, expected = (
        load_file(run / "hf" / "model.safetensors") for run in (elastic.run, unbroken)
    )
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)


FAULTY = '''
import socket
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class Faulty:
    """From step 25 on, n2 changes a bit of its embeddings after each step."""

    ranks = "all"

    def __init__(self):
        self.weight = None
        register_module_forward_pre_hook(self.find)

    def find(self, module, _):
        if isinstance(module, nn.Embedding):
            self.weight = module.weight

    def step(self, view):
        if view.step >= 25 and socket.gethostname() == "n2":
            self.weight.data.view(torch.int32)[0, 0] ^= 1 << 20
'''


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_with_wrong_bits_is_found_and_leaves(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab.folder / "faulty.py").write_text(FAULTY)
    monkeypatch.chdir(lab.folder)  # where the script's ranks look for it
    callback = json.dumps([{"type": "faulty:Faulty"}])
    settings = [*OVERRIDES, "guard.compare_every_steps=1", f"callbacks={callback}"]
    elastic = Elastic(lab, settings)
    _, served = elastic.start("n0", "serve")
    wait_until("n0 serves", lambda: "serving on port 29400" in served.read_text())
    agents = {host: elastic.start(host) for host in ("n0", "n1", "n2")}
    codes = {host: agent.wait(250) for host, (agent, _) in agents.items()}
    logs = {host: log.read_text() for host, (_, log) in agents.items()}
    assert codes == {"n0": 0, "n1": 0, "n2": EXIT_FAULTY_HOST}, logs
    assert "this node computes wrong bits, so it leaves the run" in logs["n2"]
    said = re.findall(r"step (\d+): the parameters of rank \d on (n\d) differ", elastic.story())
    assert ("26", "n2") in said
    assert elastic.world_size() == 2
    losses = metrics(elastic.run)
    assert list(losses) == list(range(1, STEPS + 1))
