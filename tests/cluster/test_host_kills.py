"""A campaign against hosts under torchrun's agents: at a random moment of a phase a rank is killed,
or a host loses its link, its processes and its memory, and comes back. The end is bit-identical to
an undisturbed run's."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Lab
from tests.cluster.test_elastic import Elastic
from tests.launch.conftest import Inputs, launch, launcher, metrics
from tests.support.cluster import Cluster, cluster, wait_until, why_not
from tests.support.moments import PHASES, EventsLog, table

NUM_KILLS = int(os.environ.get("BIGTRAIN_KILLS", 7))
PLAIN = [
    f"train.steps={60 * (NUM_KILLS + 1)}",  # more than until the last moment has come
    "checkpoint.every_steps=20",
    "checkpoint.keep_last=2",
    "checkpoint.keep_every_steps=null",
    "evaluation.every_steps=null",
    "optimizer.lr=0.001",
    "output.export=true",
    "engine.deepspeed_config=zero1",
    "watchdog.timeout_seconds=20",
    "watchdog.slow_timeout_seconds=60",
]
MEMORY = ["checkpoint.memory.every_steps=1", "checkpoint.memory.copies=1"]
KILLED = [phase for phase in PHASES if phase != "end"]
"""The end of a run is in tests/chaos."""
ENTRIES = {"training step": 20, "copy": 24, "exchange": 12, "disk save": 2}

PROBE = '''
import json, os, signal, socket, sys
from pathlib import Path


class Probe:
    """A callback that does nothing: each rank imports this module before it resumes."""

    def close(self, view):
        pass


if "bigtrain.run.training" in sys.modules and socket.gethostname() != "n0":
    from tests.support.moments import Moments

    here = Path({folder!r})
    moment = json.loads((here / "moment.json").read_text())
    moment["rank"] = int(moment["host"][1:])
    moments = Moments(here / "events.jsonl", int(socket.gethostname()[1:]), moment,
                      lambda: os.kill(os.getpid(), signal.SIGSTOP))
    moments.install()
'''


class Campaign(Elastic):
    """A run on n1 and n2; n0 serves the rendezvous."""

    def __init__(self, lab: Lab, seed: str) -> None:
        (lab.folder / "probe.py").write_text(PROBE.format(folder=str(lab.folder)))
        callbacks = json.dumps([{"type": "probe:Probe"}])
        super().__init__(lab, [*PLAIN, *MEMORY, f"callbacks={callbacks}"], "2")
        self.chooser = random.Random(seed)
        self.events = EventsLog(lab.folder / "events.jsonl")
        self.agents = {}
        self.armed, self.num_steps = (0, ""), 0

    def start_all(self) -> None:
        _, served = self.start("n0", "serve")
        wait_until("n0 serves", lambda: "serving on port 29400" in served.read_text())
        for host in ("n1", "n2"):
            self.agents[host] = self.start(host)

    def arm(self, phase: str) -> str:
        """Choose a host and a moment of `phase` for launches from here on; returns the host."""
        host = self.chooser.choice(["n1", "n2"])
        calls = self.events.calls.get((int(host[1:]), phase), 100)
        moment = {
            "host": host,
            "phase": phase,
            "entry": self.chooser.randint(1, ENTRIES.get(phase, 1)),
            "call": self.chooser.randint(1, calls),
        }
        self.armed = int(host[1:]), phase
        self.num_steps = self.events.num_left[self.armed[0], "training step"]
        draft = self.lab.folder / "moment.json.part"
        draft.write_text(json.dumps(moment))
        draft.rename(self.lab.folder / "moment.json")
        return host

    def lose(self, host: str) -> None:
        """Cut the link of `host`, whose rank has stopped at its moment, end its processes, empty
        its memory, and let it come back."""
        lab = self.lab.cluster
        lab.link(host, "down")
        for process in lab.processes(host, "bigtrain.launchers.agent"):
            process.kill()  # and with it its ranks
        self.agents[host][0].wait(30)
        wait_until("its ranks have ended", lambda: not lab.ranks(host))
        self.lab.run(host, "sh", "-c", "rm -rf /dev/shm/*")
        lab.link(host, "up")

    def wait_for_moment(self) -> dict[str, Any] | None:
        """Return the event of the armed moment, None if it is missed."""
        new_events: list[dict[str, Any]] = []

        def has_come() -> bool:
            new_events.extend(self.events.news())
            ended = [host for host, (agent, _) in self.agents.items() if agent.poll() is not None]
            assert not ended, f"{ended} ended before {self.moment()}"
            return bool(new_events) or self.is_missed()

        wait_until(f"the moment {self.moment()}", has_come, 200)
        return new_events[0] if new_events else None

    def is_missed(self) -> bool:
        """Return whether a moment of a start has not come: the host makes steps again."""
        number, phase = self.armed
        num_steps = self.events.num_left[number, "training step"] - self.num_steps
        return phase in ("recovery", "transfer") and num_steps > 4

    def moment(self) -> str:
        return (self.lab.folder / "moment.json").read_text()

    def kill_rank(self, host: str) -> None:
        [rank] = self.lab.cluster.ranks(host)
        rank.kill()

    def in_memory(self, host: str) -> list[str]:
        """Return all files in shared memory of `host`."""
        return self.lab.run(host, "find", "/dev/shm", "-type", "f")[1].splitlines()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """n0, n1 and n2, without sshd and Slurm, which nothing here needs."""
    if reason := why_not(slurm=False, ssh=False):
        pytest.skip(reason)
    state = tmp_path_factory.mktemp("cluster") / "state"
    with cluster(state, 3, slurm=False, ssh=False, subnet="10.76.0") as running:
        yield running


@pytest.fixture
def lab(hosts: Cluster, inputs: Inputs, tmp_path: Path) -> Iterator[Lab]:
    run_yaml = tmp_path / "run.yaml"
    text = inputs.run_yaml.read_text()
    run_yaml.write_text(text.replace(str(inputs.run_yaml.parent / "run"), str(tmp_path / "run")))
    yield Lab(hosts, tmp_path, run_yaml)
    hosts.tidy()


@pytest.fixture
def campaign(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Campaign]:
    monkeypatch.chdir(lab.folder)  # where the script's ranks look for the probe
    yield Campaign(lab, os.environ.get("BIGTRAIN_SEED", "1"))
    for log in sorted(lab.folder.glob("*.log")):  # shown where the test has failed
        print(f"== {log.name}\n{log.read_text()[-4000:]}")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_hosts_lost_at_random_moments_change_no_bit(campaign: Campaign, tmp_path: Path) -> None:
    """BIGTRAIN_KILLS and BIGTRAIN_SEED: other numbers; a failure prints the moment."""
    hits: Counter[tuple[str, str, str]] = Counter()
    phases = [KILLED[number % len(KILLED)] for number in range(NUM_KILLS)]
    campaign.chooser.shuffle(phases)
    while phases[0] == "transfer":
        phases.append(phases.pop(0))
    host = campaign.arm(phases[0])
    campaign.start_all()
    for number, phase in enumerate(phases):
        while (
            moment := campaign.wait_for_moment()
        ) is None:  # made more calls in an earlier launch
            lost = host
            campaign.lose(lost)
            host = campaign.arm(phase)
            campaign.agents[lost] = campaign.start(lost)
        following, killed = phases[number + 1 :], host
        kind = campaign.chooser.choice(["rank", "host", "host"])
        if following[:1] == ["transfer"]:  # to a host that has lost its memory
            kind = "host"
        print(f"kill {number}: {kind} {host} at {moment}", flush=True)
        assert moment["phase"] == phase
        hits["zero1, agents", kind, phase] += 1
        if kind == "host":
            campaign.lose(killed)
        if following:
            host = campaign.arm(following[0])
        else:
            (campaign.lab.folder / "moment.json").write_text('{"host": "n0", "call": 0}')
        if kind == "host":
            campaign.agents[killed] = campaign.start(killed)
        else:
            campaign.kill_rank(killed)
    for agent, log in campaign.agents.values():
        assert agent.wait(400) == 0, log.read_text()
    print(table(hits))
    for one in ("n1", "n2"):
        assert campaign.in_memory(one) == []
    assert {phase for _, _, phase in hits} == set(KILLED) or NUM_KILLS < len(KILLED)

    undisturbed = tmp_path / "undisturbed"
    two = [*launcher("torchrun"), "--config", campaign.lab.run_yaml, *PLAIN]
    finished = launch([*two, f"output.directory={undisturbed}"], campaign.lab.run_yaml.parent)
    assert finished.code == 0, finished.output
    assert metrics(campaign.run) == metrics(undisturbed)
    files = [run / "hf" / "model.safetensors" for run in (campaign.run, undisturbed)]
    assert files[0].read_bytes() == files[1].read_bytes()
