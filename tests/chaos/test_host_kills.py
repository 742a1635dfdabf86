"""A campaign of kills: at a random moment of a phase, a rank or a host with its memory is lost, and
the same command is started again. The end is bit-identical to an undisturbed run's."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.memory_directory import StoredInMemory, stored_at
from tests.chaos.conftest import STEPS, arguments, assert_same_run
from tests.support.lives import Server
from tests.support.moments import PHASES, EventsLog, table
from tests.support.own_host import why_no_hosts
from tests.support.tiers import FULL

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3000)]

TOPOLOGIES = {
    "expert2 with flips": (4, ["zero1", "parallel.expert=2", "guard.compare_every_steps=1"]),
}
HOSTS = ["n0", "n1"]
ENTRIES = {"training step": 8, "copy": 12, "exchange": 6, "disk save": 6}
"""Entries of a phase from which one is chosen; the first, of those that a life has once."""
LIMIT_SECONDS = 100.0
"""For a life, which takes seconds: a longer one hangs."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in shared memory with one for each host and the one that each host sees."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="bigtrain-test-", dir="/dev/shm") as name:
        for one in (*HOSTS, "mount"):
            Path(name, one).mkdir()
        yield Path(name)


@dataclass
class Campaign:
    """Runs of one topology on two hosts, and the kills they have survived."""

    server: Server
    memory: Path
    root: Path
    run_yaml: Path
    size: int
    settings: list[str]
    chooser: random.Random
    events: EventsLog
    hits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Kills by kind and phase."""
    last_kill: str = ""
    flips: bool = False
    """Whether lives that can go back to disk have a flipped bit, of a parameter or an expert."""
    num_flips: int = 0
    """Those that the run noticed."""

    def command(self, run: Path) -> list[str]:
        own = [
            "checkpoint.memory.every_steps=1",
            "checkpoint.memory.copies=1",
            f"checkpoint.memory.directory={self.memory / 'mount'}",
            "checkpoint.every_steps=5",
            "checkpoint.keep_every_steps=null",
        ]
        return arguments(self.run_yaml, run, "--deepspeed_config", *self.settings, *own)

    def live(self, run: Path, moment: dict[str, Any] | None) -> tuple[list[int], str]:
        hosts = {
            "names": HOSTS,
            "memory": [str(self.memory / host) for host in HOSTS],
            "mount": str(self.memory / "mount"),
        }
        whole = {"kill": [], "rank": -1, **(moment or {}), "events": str(self.events.path)}
        more = {"hosts": hosts, "moment": whole, "world_size": self.size}
        if self.flips and checkpoints.list_steps(run):
            steps = {self.chooser.randint(1, 5): self.chooser.choice(["parameter", "expert"])}
            more["spoil"] = {
                "rank": self.chooser.randrange(self.size),
                "steps": {str(step): f"{of} bit" for step, of in steps.items()},
            }
        return self.server.live(self.command(run), limit_seconds=LIMIT_SECONDS, **more)

    def moment(self, phase: str, kind: str) -> dict[str, Any]:
        """Choose a moment of `phase`, on a rank whose process or host (or all) is killed."""
        rank = self.chooser.randrange(self.size)
        kill = [rank]
        if kind == "host":
            each = self.size // len(HOSTS)
            kill = [other for other in range(self.size) if other // each == rank // each]
        elif kind == "all hosts":
            kill = list(range(self.size))
        calls = self.events.calls.get((rank, phase), 100)
        entry = self.chooser.randint(1, ENTRIES.get(phase, 1))
        call = self.chooser.randint(1, calls)
        return {"rank": rank, "phase": phase, "entry": entry, "call": call, "kill": kill}

    def lose(self, moment: dict[str, Any], kind: str) -> None:
        """Empty the memory of lost hosts."""
        each = self.size // len(HOSTS)
        for number in {rank // each for rank in moment["kill"]} if kind != "rank" else ():
            shutil.rmtree(self.memory / HOSTS[number])
            (self.memory / HOSTS[number]).mkdir()

    def newest_complete(self, run: Path) -> int:
        """Return the step of the newest checkpoint that is complete on disk or in memory."""
        stored: dict[tuple[int, str], list[StoredInMemory]] = {}
        for path in self.memory.glob("n?/bigtrain-*/*/checkpoints/step-????????"):
            try:
                one = stored_at(path)
            except (CorruptCheckpointError, OSError):
                continue
            stored.setdefault((one.step, one.digest), []).append(one)
        complete = [
            step
            for (step, _), ones in stored.items()
            if ones[0].writers == len(frozenset().union(*(one.files for one in ones)))
        ]
        return max([0, *complete, *checkpoints.list_steps(run)])

    def survive(self, run: Path, kills: list[tuple[str, str]]) -> None:
        """Kill `run` at moments of (phase, kind) until it ends. Of `kills`, those that came are
        removed. A moment that cannot come in this life is left for another; a host is lost first
        where one needs that."""
        oldest, is_ended, has_lost_host = 0, False, False
        while not is_ended:
            possible = [
                one for one in kills
                if (one[0] != "recovery" or oldest) and (one[0] != "transfer" or has_lost_host)
            ]  # fmt: skip
            if kills and not possible:
                kills.append(("training step", "host"))
                possible = kills[-1:]
            chosen = self.chooser.choice(possible) if possible else None
            moment = None if chosen is None else self.moment(*chosen)
            codes, text = self.live(run, moment)
            what = f"{run.name}: moment {moment}, before it {self.last_kill}\n{text}"
            hits = self.events.news()
            resumed = [int(step) for step in re.findall(r"resumed at step (\d+) from", text)]
            assert len(resumed) <= 1, what
            if resumed:
                assert resumed[0] >= oldest, f"resumed before step {oldest}; {what}"
            is_ended = not hits
            if not hits or hits[0]["phase"] not in ("recovery", "transfer"):
                assert resumed or oldest in (0, STEPS), f"not resumed at step {oldest}; {what}"
            assert "is corrupt" not in text, what
            assert "Traceback" not in text or hits, what
            self.num_flips += "with the same samples, newer checkpoints are removed" in text
            if is_ended:
                assert codes == [0] * self.size, what
                break
            assert chosen is not None
            assert moment is not None
            kills.remove(chosen)
            phase, kind = chosen
            assert all(codes[rank] == -signal.SIGKILL for rank in moment["kill"]), what
            self.hits[kind, phase] += 1
            self.last_kill = f"{kind} in {hits[0]}"
            print(f"{run.name}: {moment}: killed {self.last_kill}", flush=True)
            self.lose(moment, kind)
            has_lost_host = kind == "host"
            oldest = self.newest_complete(run)
            if kind != "all hosts":
                assert oldest >= self.events.saved, (
                    f"step {self.events.saved} was complete in memory, {oldest} is left; {what}"
                )

    def left_in_memory(self) -> list[str]:
        return sorted(str(one.relative_to(self.memory)) for one in self.memory.glob("*/*"))


@pytest.mark.slow
def test_a_host_lost_in_an_exchange_resumes_with_its_partners_files(
    server: Server, run_yaml: Path, memory: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    log = EventsLog(tmp_path / "events.jsonl")
    chooser = random.Random(0)
    campaign = Campaign(server, memory, tmp_path, run_yaml, 2, ["zero2"], chooser, log)
    run = tmp_path / "run"
    moment = {"rank": 1, "phase": "exchange", "entry": 2, "call": 50, "kill": [1]}
    codes, text = campaign.live(run, moment)
    assert codes[1] == -signal.SIGKILL, text
    [hit] = log.news()
    assert hit["phase"] == "exchange"
    campaign.lose(moment, "host")
    newest = campaign.newest_complete(run)
    assert checkpoints.list_steps(run) == []
    assert newest >= log.saved >= 1  # in memory of the host that is left
    codes, text = campaign.live(run, None)
    assert codes == [0, 0], text
    assert f"resumed at step {newest} from {memory / 'mount'}" in text
    assert log.news() == []
    assert {(0, "transfer"), (1, "transfer")} <= log.calls.keys()
    assert campaign.left_in_memory() == []
    assert_same_run(run, uninterrupted)


def wanted(num_kills: int, chooser: random.Random) -> list[tuple[str, str]]:
    """Return so many kills, the same number (or one more) in each phase: of ranks, of a host, and
    now and then of both."""
    kills = []
    for number in range(num_kills):
        kind = chooser.choices(["rank", "host", "all hosts"], [48, 47, 5])[0]
        kills.append((list(PHASES)[number % len(PHASES)], kind))
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_hosts_killed_at_random_moments_change_no_bit(
    server: Server, run_yaml: Path, experts_yaml: Path, memory: Path, tmp_path: Path, topology: str
) -> None:
    """BIGTRAIN_KILLS and BIGTRAIN_SEED: other numbers; a failure prints the moment."""
    num_kills = int(os.environ.get("BIGTRAIN_KILLS", 40 if FULL else 8))
    seed = os.environ.get("BIGTRAIN_SEED", "1")
    size, settings = TOPOLOGIES[topology]
    yaml_file = experts_yaml if "expert2" in topology else run_yaml
    chooser = random.Random(f"{topology} {seed}")
    log = EventsLog(tmp_path / "events.jsonl")
    campaign = Campaign(server, memory, tmp_path, yaml_file, size, settings, chooser, log)
    undisturbed = tmp_path / "undisturbed"
    codes, text = campaign.live(undisturbed, None)
    assert codes == [0] * size, text
    log.news()
    assert campaign.left_in_memory() == []
    campaign.flips = "flips" in topology
    kills, num_runs = wanted(num_kills, chooser), 0
    while kills:
        num_runs += 1
        assert num_runs <= 3 * num_kills, f"seed {seed}: these never come: {kills}"
        run = tmp_path / f"run-{num_runs}"
        campaign.survive(run, kills)
        what = f"seed {seed}, run {num_runs}; last {campaign.last_kill}"
        assert campaign.left_in_memory() == [], what
        assert_same_run(run, undisturbed)
    by_phase = Counter({(topology, kind, phase): n for (kind, phase), n in campaign.hits.items()})
    kills_and_flips = f"{sum(by_phase.values())} kills of {num_runs} runs"
    if campaign.flips:
        kills_and_flips += f", {campaign.num_flips} flipped bits noticed"
        assert campaign.num_flips
    print(f"\nseed {seed}: {kills_and_flips}\n{table(by_phase)}")
    assert num_kills < len(PHASES) or {phase for _, phase in campaign.hits} == set(PHASES)
