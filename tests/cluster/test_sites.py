"""Sites and their server on hosts of their own, while hosts and links fail: the same scenario for
both ways to exchange, and losses in the middle of a direct exchange."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bigtrain.run.checkpointing import checkpoints
from tests.cluster.conftest import TRAIN
from tests.launch.conftest import Inputs
from tests.launch.test_sites import assert_same_weights, outer_lines
from tests.support.cluster import wait_until
from tests.support.cluster.network import Network, network, why_no_network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

PORT = 29700
INNER_STEPS = 10
LONG = 100_000
"""Steps of a run that is stopped before."""


@dataclass
class Lab:
    """Site N on sN; the server on hub, or started by site 0 on its host."""

    net: Network
    folder: Path
    run_yaml: Path
    count: int
    exchange: str = "direct"
    server: str = "hub"
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    serving: subprocess.Popen[bytes] | None = None

    def serve(self, window: float = 3.0) -> None:
        """Start the server, again with the directory it had."""
        command = ("-m", "bigtrain.cli", "outer-server", "--window-seconds", str(window))
        place = ("--directory", self.folder / "state", "--port", str(PORT), "--host", "0.0.0.0")
        token = ("--token-file", self.token())
        log = self.folder / "hub.log"
        self.serving = self.net.start("hub", log, *command, *place, *token)

    def token(self) -> Path:
        token = self.folder / "token"
        token.write_text("0123456789abcdef0123456789abcdef")
        return token

    def train(self, site: int, steps: int, *settings: str) -> None:
        command = [
            *(TRAIN, "--config", self.run_yaml, f"sites.index={site}", f"sites.count={self.count}"),
            f"sites.server=http://{self.net.address(self.server)}:{PORT}",
            *(f"sites.token_file={self.token()}", f"sites.exchange={self.exchange}"),
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
        count = 0
        with suppress(FileNotFoundError):
            for line in (self.folder / str(site) / "metrics.jsonl").read_text().splitlines():
                with suppress(ValueError):  # the last one may be written just now
                    count += json.loads(line).get("sites") == sites
        return count

    def wait_for_steps(self, sites: list[int], at: list[int] | None = None) -> None:
        """Until two more outer steps were made with just these sites, on all of them."""
        at = at or sites
        before = {site: self.num_steps(site, sites) for site in at}

        def made() -> bool:
            for site, process in self.running.items():
                assert process.poll() is None, f"{site} ended:\n{self.text(site)[-3000:]}"
            return all(self.num_steps(site, sites) >= before[site] + 2 for site in at)

        wait_until(f"outer steps with {sites}", made, 300)

    def wait_until_alone(self, *sites: int) -> None:
        """Until these have gone on without an outer step that they could not make."""
        words = "trains on its own"
        before = {site: self.text(site).count(words) for site in sites}

        def alone() -> bool:
            return all(
                self.text(n).count("trains on its own") > count for n, count in before.items()
            )

        wait_until(f"sites {sites} train alone", alone, 300)


@pytest.fixture
def net() -> Iterator[Network]:
    reason = why_no_network()
    if reason is not None:
        pytest.skip(reason)
    with network(["hub", "s0", "s1", "s2"]) as site_network:
        yield site_network


def finish(lab: Lab, *settings: str) -> None:
    """Stop all, and let them train on for some steps to an end with the same weights."""
    for site in list(lab.running):
        assert lab.end(site, signal.SIGTERM) == 75, lab.text(site)[-3000:]
    newest = [max(checkpoints.list_steps(lab.folder / str(site))) for site in range(lab.count)]
    last = max(newest) // INNER_STEPS * INNER_STEPS + 4 * INNER_STEPS
    for site in range(lab.count):
        lab.train(site, last, "output.export=true", *settings)
    for site in range(lab.count):
        assert lab.running.pop(site).wait(300) == 0, lab.text(site)[-3000:]
    for site in range(lab.count):
        assert outer_lines(lab.folder / str(site))[-1]["sites"] == list(range(lab.count))
    assert_same_weights(lab.folder, *map(str, range(lab.count)))


def events(run: Path) -> set[tuple[str, str]]:
    """What happened to sites and their server, as a run's metrics tell it."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {(line["event"], line["who"]) for line in lines if "event" in line and "who" in line}


def paused(process: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    """Let a process run for a tenth of the time only, until `until`."""
    while not until():
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.9)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)


SETTINGS = {
    "server": ("sites.codec=int8",),
    "streaming": ("sites.fragments=2", "sites.overlap_steps=2"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_sites_go_on_without_those_that_are_lost(
    name: str, net: Network, inputs: Inputs, tmp_path: Path
) -> None:
    settings, exchange = SETTINGS[name], "server" if name == "server" else "direct"
    lab = Lab(net, tmp_path, inputs.run_yaml, 3, exchange)
    lab.serve()
    for site in range(3):
        lab.train(site, LONG, *settings)
    lab.wait_for_steps([0, 1, 2])
    # A link is cut, and mended: the others go on, and the one behind it trains on its own.
    net.link("s2", "down")
    lab.wait_for_steps([0, 1])
    lab.wait_until_alone(2)
    net.link("s2", "up")
    lab.wait_for_steps([0, 1, 2])
    # A site is killed, and is back.
    lab.end(0, signal.SIGKILL)
    lab.wait_for_steps([1, 2])
    lab.train(0, LONG, *settings)
    lab.wait_for_steps([0, 1, 2])
    # Two are killed, one after the other, and come back one after the other.
    lab.end(1, signal.SIGKILL)
    lab.wait_for_steps([0, 2])
    lab.end(0, signal.SIGKILL)
    lab.wait_for_steps([2])
    lab.train(1, LONG, *settings)
    lab.wait_for_steps([1, 2])
    lab.train(0, LONG, *settings)
    lab.wait_for_steps([0, 1, 2])
    # The host of the server is cut off, and is back: nobody has made an outer step meanwhile.
    net.link("hub", "down")
    lab.wait_until_alone(0, 1, 2)
    net.link("hub", "up")
    lab.wait_for_steps([0, 1, 2])
    # The server is killed, and started again with its directory.
    assert lab.serving is not None
    lab.serving.kill()
    lab.serving.wait(60)
    lab.wait_until_alone(0, 1, 2)
    lab.serve()
    lab.wait_for_steps([0, 1, 2])
    finish(lab, *settings)
    told = events(tmp_path / "2")
    assert {("site_alone", "site 2"), ("site_returned", "site 2")} <= told
    assert {
        (event, f"site {n}") for event in ("site_left_out", "site_returned") for n in (0, 1)
    } <= told
    numbers = [line["outer_step"] for line in outer_lines(tmp_path / "2")]
    assert numbers == sorted(numbers)


def test_site_0_starts_the_server_and_finds_it_again(
    net: Network, inputs: Inputs, tmp_path: Path
) -> None:
    """It outlives the training process, and ends when all sites have left."""
    lab = Lab(net, tmp_path, inputs.run_yaml, 2, server="s0")
    # Site 1 may be there long before site 0 has started the server.
    settings = ("sites.start_server=true", "batch.global_batch_size=8", "sites.timeout_seconds=60")
    for site in (1, 0):
        lab.train(site, LONG, *settings)
    lab.wait_for_steps([0, 1])
    lab.end(0, signal.SIGKILL)
    lab.wait_for_steps([1])
    lab.train(0, LONG, *settings)
    lab.wait_for_steps([0, 1])
    assert "started the outer server at" in lab.text(0)
    assert "is running already" in lab.text(0)
    finish(lab, *settings)
    log = tmp_path / "0" / "outer_server" / "server.log"
    wait_until("the server ends", lambda: log.read_text().count("stopped; restart") == 2, 60)


def test_a_site_is_lost_in_the_middle_of_an_exchange(
    net: Network, inputs: Inputs, tmp_path: Path
) -> None:
    """Which takes most of the time here: it does not count, and the others try again."""
    lab = Lab(net, tmp_path, inputs.run_yaml, 3)
    lab.serve()
    net.limit("s2", "400kbit")
    for site in range(3):
        lab.train(site, LONG)
    lab.wait_for_steps([0, 1, 2])
    # Of the 77 kB that it sends for each outer step: control messages are far smaller.
    sent = net.sent_bytes("s2")
    wait_until("an exchange is under way", lambda: net.sent_bytes("s2") > sent + 20_000, 60)
    net.link("s2", "down")
    lab.wait_for_steps([0, 1])
    said = [line for line in lab.text(0).splitlines() if "outer step" in line]
    assert any("site 2 is left out: was lost during the exchange" in line for line in said), said
    net.link("s2", "up")
    lab.wait_for_steps([0, 1, 2])
    finish(lab)


def test_a_site_ten_times_slower_is_left_out(net: Network, inputs: Inputs, tmp_path: Path) -> None:
    """The other waits for it no longer than its limit, and takes it back when it can follow; so it
    does where the slow one has led."""
    lab = Lab(net, tmp_path, inputs.run_yaml, 2)
    lab.serve(window=2.0)
    settings = ("batch.global_batch_size=8", "sites.timeout_seconds=4", "sites.inner_steps=50")
    for site in range(2):
        lab.train(site, LONG, *settings)
    lab.wait_for_steps([0, 1])
    slow, fast = 0, 1
    before = lab.num_steps(fast, [fast])
    paused(lab.running[slow], lambda: lab.num_steps(fast, [fast]) >= before + 4)
    lab.wait_for_steps([0, 1])
    finish(lab, *settings)
    waits = [line["waited_seconds"] for line in outer_lines(tmp_path / str(fast))][1:]
    assert max(waits) < 4 + 2
    told = events(tmp_path / str(fast))
    assert {(event, f"site {slow}") for event in ("site_left_out", "site_returned")} <= told
