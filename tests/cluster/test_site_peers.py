"""Sites that meet at an address on hosts of their own, while hosts and links fail."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bigtrain.run.checkpointing import checkpoints
from tests.cluster.conftest import TRAIN
from tests.cluster.test_sites import events, paused
from tests.launch.conftest import Inputs
from tests.launch.test_sites import assert_same_weights, outer_lines
from tests.support.cluster import wait_until
from tests.support.cluster.network import Network, network, why_no_network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

INNER_STEPS = 10
LONG = 100_000
"""Steps of a run that is stopped before."""


@dataclass
class Lab:
    """Site N on sN; no server."""

    net: Network
    folder: Path
    run_yaml: Path
    count: int
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def train(self, site: int, steps: int, *settings: str) -> None:
        command = [
            *(TRAIN, "--config", self.run_yaml, f"sites.index={site}", f"sites.count={self.count}"),
            f"sites.address={self.net.address('s0')}:29600",
            *(f"sites.inner_steps={INNER_STEPS}", "sites.timeout_seconds=8"),
            f"output.directory={self.folder / str(site)}",
            *(f"train.steps={steps}", "engine.deepspeed_config=zero1"),
            *("batch.global_batch_size=12", "checkpoint.every_steps=50"),
            "checkpoint.allow_changes=[train.steps]",
            *("evaluation.every_steps=null", "schedule.type=constant", *settings),
        ]
        log = self.folder / f"{site}.log"
        self.running[site] = self.net.start(f"s{site}", log, *command)

    def end(self, site: int, received: signal.Signals) -> int:
        process = self.running.pop(site)
        process.send_signal(received)
        return process.wait(60)

    def text(self, site: int) -> str:
        return (self.folder / f"{site}.log").read_text()

    def num_steps(self, site: int, sites: list[int]) -> int:
        """Outer steps that a site has made with just these."""
        found = 0
        with suppress(FileNotFoundError):
            for line in (self.folder / str(site) / "metrics.jsonl").read_text().splitlines():
                with suppress(ValueError):  # the last one may be written just now
                    found += json.loads(line).get("sites") == sites
        return found

    def wait_for_steps(self, sites: list[int], at: list[int] | None = None) -> None:
        """Until two more outer steps were made with just these sites, on all of them."""
        at = at or sites
        before = {site: self.num_steps(site, sites) for site in at}

        def made() -> bool:
            for site, process in self.running.items():
                assert process.poll() is None, f"{site} ended:\n{self.text(site)[-3000:]}"
            return all(self.num_steps(site, sites) >= before[site] + 2 for site in at)

        wait_until(f"outer steps with {sites}", made, 150)


@pytest.fixture
def net() -> Iterator[Network]:
    reason = why_no_network()
    if reason is not None:
        pytest.skip(reason)
    with network(["s0", "s1", "s2"]) as found:
        yield found


def finish(lab: Lab, *settings: str) -> None:
    """Stop all, and let them train on for some steps to an end with the same weights."""
    for site in list(lab.running):
        assert lab.end(site, signal.SIGTERM) == 75, lab.text(site)[-3000:]
    newest = [max(checkpoints.steps(lab.folder / str(site))) for site in range(lab.count)]
    last = max(newest) // INNER_STEPS * INNER_STEPS + 4 * INNER_STEPS
    for site in range(lab.count):
        lab.train(site, last, "output.export=true", *settings)
    for site in range(lab.count):
        assert lab.running.pop(site).wait(120) == 0, lab.text(site)[-3000:]
    for site in range(lab.count):
        assert outer_lines(lab.folder / str(site))[-1]["sites"] == list(range(lab.count))
    assert_same_weights(lab.folder, *map(str, range(lab.count)))


@pytest.mark.parametrize(
    "settings", [("sites.codec=int8",), ("sites.fragments=2", "sites.overlap_steps=2")]
)
def test_sites_go_on_without_those_that_are_lost(
    settings: tuple[str, ...], net: Network, inputs: Inputs, tmp_path: Path
) -> None:
    lab = Lab(net, tmp_path, inputs.run_yaml, 3)
    for site in range(3):
        lab.train(site, LONG, *settings)
    lab.wait_for_steps([0, 1, 2])
    # A link is cut, and mended: the others go on, and the one behind it by itself.
    net.link("s2", "down")
    lab.wait_for_steps([0, 1])
    lab.wait_for_steps([2])
    net.link("s2", "up")
    lab.wait_for_steps([0, 1, 2])
    # The site at sites.address is killed, and is back.
    lab.end(0, signal.SIGKILL)
    lab.wait_for_steps([1, 2])
    lab.train(0, LONG, *settings)
    lab.wait_for_steps([0, 1, 2])
    # Two are killed, one after the other, and one of them is back while site 0 is not.
    lab.end(1, signal.SIGKILL)
    lab.wait_for_steps([0, 2])
    lab.end(0, signal.SIGKILL)
    lab.wait_for_steps([2])
    lab.train(1, LONG, *settings)
    lab.wait_for_steps([1, 2])
    lab.train(0, LONG, *settings)
    lab.wait_for_steps([0, 1, 2])
    finish(lab, *settings)
    told = {(one["event"], one["who"]) for one in events(tmp_path / "2")}
    assert {("site_alone", "site 2"), ("site_returned", "site 2")} <= told
    assert {
        (event, f"site {n}") for event in ("site_left_out", "site_returned") for n in (0, 1)
    } <= told


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_site_is_lost_in_the_middle_of_an_exchange(
    how: str, net: Network, inputs: Inputs, tmp_path: Path
) -> None:
    """Which takes most of the time here: it does not count, and the others try again."""
    lab = Lab(net, tmp_path, inputs.run_yaml, 3)
    net.limit("s2", "400kbit")
    for site in range(3):
        lab.train(site, LONG)
    lab.wait_for_steps([0, 1, 2])
    time.sleep(1.5)
    if how == "killed":
        lab.end(2, signal.SIGKILL)
    else:
        net.link("s2", "down")
    lab.wait_for_steps([0, 1])
    said = [line for line in lab.text(0).splitlines() if "outer step" in line]
    assert any("site 2 is left out: was lost during the exchange" in line for line in said), said
    if how == "cut":
        net.link("s2", "up")
    else:
        lab.train(2, LONG)
    lab.wait_for_steps([0, 1, 2])
    finish(lab)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_site_ten_times_slower_is_left_out(
    slow: int, net: Network, inputs: Inputs, tmp_path: Path
) -> None:
    """The other waits for it no longer than its limit, and takes it back when it can follow; so it
    does where the slow one has led."""
    lab = Lab(net, tmp_path, inputs.run_yaml, 2)
    settings = ("batch.global_batch_size=8", "sites.timeout_seconds=4", "sites.inner_steps=50")
    for site in range(2):
        lab.train(site, LONG, *settings)
    lab.wait_for_steps([0, 1])
    fast = 1 - slow
    before = lab.num_steps(fast, [fast])
    paused(lab.running[slow], lambda: lab.num_steps(fast, [fast]) >= before + 4)
    lab.wait_for_steps([0, 1])
    finish(lab, *settings)
    waits = [line["waited_seconds"] for line in outer_lines(tmp_path / str(fast))][1:]
    print(waits)
    assert max(waits) < 4 + 2
    told = {(one["event"], one["who"]) for one in events(tmp_path / str(fast))}
    assert {(event, f"site {slow}") for event in ("site_left_out", "site_returned")} <= told
