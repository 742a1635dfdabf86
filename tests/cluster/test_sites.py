"""Sites and their outer server on hosts of their own, while hosts, links and messages fail."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigtrain.run.checkpointing import checkpoints
from tests.cluster.conftest import TRAIN
from tests.launch.conftest import Inputs
from tests.launch.test_sites import outer_lines
from tests.support.cluster import wait_until
from tests.support.cluster.network import Network, network, why_no_network
from tests.support.outer_servers import rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PORT = 29700
INNER_STEPS = 10
LONG = 100_000
"""Steps of a run that is stopped before."""


@dataclass
class Lab:
    """Site 0 on s0, site 1 on s1, the server on hub."""

    net: Network
    folder: Path
    run_yaml: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def serve(self, *options: str) -> None:
        token = self.folder / "token"
        token.write_text("0123456789abcdef0123456789abcdef")
        command = ("-m", "bigtrain.cli", "outer-server", "--token-file", token, *options)
        place = ("--directory", self.folder / "state", "--port", str(PORT), "--host", "0.0.0.0")
        self.running["hub"] = self.net.start("hub", self.folder / "hub.log", *command, *place)

    def train(self, site: int, steps: int, *settings: str) -> None:
        command = [
            *(TRAIN, "--config", self.run_yaml, f"sites.index={site}", "sites.count=2"),
            f"sites.server=http://{self.net.address('hub')}:{PORT}",
            f"sites.token_file={self.folder / 'token'}",
            *(f"sites.inner_steps={INNER_STEPS}", "sites.timeout_seconds=4"),
            f"output.directory={self.folder / str(site)}",
            *(f"train.steps={steps}", "engine.deepspeed_config=zero1"),
            *("checkpoint.every_steps=50", "checkpoint.allow_changes=[train.steps]"),
            *("evaluation.every_steps=null", "schedule.type=constant", *settings),
        ]
        log = self.folder / f"{site}.log"
        self.running[f"s{site}"] = self.net.start(f"s{site}", log, *command)

    def end(self, name: str, received: signal.Signals) -> int:
        process = self.running.pop(name)
        process.send_signal(received)
        return process.wait(60)

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def outer_steps(self) -> list[tuple[int, str]]:
        """Number and sites of the outer steps that the server has told of."""
        matches = re.findall(r"outer step (\d+) with site (.*)", self.text("hub"))
        return [(int(number), sites) for number, sites in matches]

    def wait_for_steps(self, sites: str, count: int = 2) -> None:
        """Until so many more outer steps were made with just these sites."""
        before = len([one for one in self.outer_steps() if one[1] == sites])

        def made() -> bool:
            for name, process in self.running.items():
                assert process.poll() is None, f"{name} ended:\n{self.text(name[-1:])[-3000:]}"
            now = len([one for one in self.outer_steps() if one[1] == sites])
            return now >= before + count

        wait_until(f"{count} outer steps with {sites}", made, 120)


@pytest.fixture
def lab(inputs: Inputs, tmp_path: Path) -> Iterator[Lab]:
    reason = why_no_network()
    if reason is not None:
        pytest.skip(reason)
    with network(["hub", "s0", "s1"]) as net:
        yield Lab(net, tmp_path, inputs.run_yaml)


def stop_and_finish(lab: Lab, *settings: str) -> None:
    """Stop both sites, and let them train on for some steps to an end with the same weights."""
    for name in ("s0", "s1"):
        assert lab.end(name, signal.SIGTERM) == 75
    steps = [max(checkpoints.list_steps(lab.folder / str(site))) for site in (0, 1)]
    last = max(steps) // INNER_STEPS * INNER_STEPS
    for site in (0, 1):
        lab.train(site, last + 4 * INNER_STEPS, "output.export=true", *settings)
    for name in ("s0", "s1"):
        assert lab.running.pop(name).wait(120) == 0, lab.text(name[-1:])[-3000:]
    assert_same_weights(lab.folder)


def assert_same_weights(folder: Path) -> None:
    first, second = (load_file(folder / site / "hf" / "model.safetensors") for site in "01")
    for key, weight in first.items():
        assert torch.equal(weight, second[key]), key


def events(run: Path) -> list[dict[str, Any]]:
    """What happened to sites and their server, as a run's metrics tell it."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "event" in line and "who" in line]


def test_sites_go_on_while_hosts_and_links_fail(lab: Lab) -> None:
    settings = ("sites.codec=int8",)
    lab.serve("--window-seconds", "2")
    for site in (0, 1):
        lab.train(site, LONG, *settings)
    lab.wait_for_steps("0, 1")
    # A link is cut, and mended.
    lab.net.link("s1", "down")
    lab.wait_for_steps("0")
    assert "site 1 missed outer step" in lab.text("hub")
    wait_until("site 1 is alone", lambda: "this site trains on its own" in lab.text("1"))
    lab.net.link("s1", "up")
    lab.wait_for_steps("0, 1")
    assert "site 1 was late for outer step" in lab.text("hub")
    assert "missed outer step" in lab.text("1")
    # A site is killed in the middle of a window, and is back later.
    lab.end("s1", signal.SIGKILL)
    lab.wait_for_steps("0")
    lab.train(1, LONG, *settings)
    lab.wait_for_steps("0, 1")
    assert "jumping to step" in lab.text("1")
    # The server is killed and started again.
    lab.end("hub", signal.SIGKILL)
    number = lab.outer_steps()[-1][0]
    alone = lab.text("0").count("this site trains on its own")
    wait_until(
        "site 0 goes on without the server",
        lambda: lab.text("0").count("this site trains on its own") > alone,
    )
    lab.serve("--window-seconds", "2")
    lab.wait_for_steps("0, 1")
    numbers = [one for one, _ in lab.outer_steps()]
    assert numbers == list(range(1, numbers[-1] + 1))
    assert numbers[-1] > number
    # Strangers are named, and change nothing.
    script = (
        "import http.client\n"
        "for headers in ({}, {'x-bigtrain-nonce': 'a', 'x-bigtrain-signature': '0' * 64}):\n"
        "    for body in (b'no message', pack({'site': 0})):\n"
        f"        c = http.client.HTTPConnection('{lab.net.address('hub')}', {PORT})\n"
        "        c.request('POST', '/deliver', body, headers)\n"
        "        print(c.getresponse().status)\n"
    )
    script = "from bigtrain.sites.protocol import pack\n" + script
    assert lab.net.start("s0", lab.folder / "stranger.log", "-c", script).wait(60) == 0
    assert lab.text("stranger").split() == ["401"] * 4
    address = lab.net.address("s0")
    assert f"{address}: refused a message (deliver) that nobody signed" in lab.text("hub")
    lab.wait_for_steps("0, 1")
    stop_and_finish(lab, *settings)
    taken = [tuple(line["sites"]) for line in outer_lines(lab.folder / "0")]
    assert {(0,), (0, 1)} <= set(taken)
    assert taken[-1] == (0, 1)
    told = {(one["event"], one["who"]) for one in events(lab.folder / "0")}
    assert {("site_alone", "site 0"), ("site_left_out", "site 1")} <= told
    assert {("site_returned", "site 1"), ("message_refused", address)} <= told


def paused(process: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    """Let a process run for a tenth of the time only, until `until`."""
    import time

    while not until():
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.9)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)


def test_a_site_ten_times_slower_is_left_out_of_a_synchronous_mean(lab: Lab) -> None:
    """The fast site waits for it no longer than the server's window, and both end alike."""
    window, steps = 2.0, 2000
    settings = ("sites.timeout_seconds=30", "sites.inner_steps=50", "output.export=true")
    lab.serve("--window-seconds", str(window))
    for site in (0, 1):
        lab.train(site, steps, *settings)
    lab.wait_for_steps("0, 1")
    slow = lab.running["s1"]
    paused(slow, lambda: slow.poll() is not None)
    for name in ("s0", "s1"):
        assert lab.running.pop(name).wait(120) == 0, lab.text(name[-1:])[-3000:]
    assert_same_weights(lab.folder)
    of_fast, of_slow = (outer_lines(lab.folder / str(site)) for site in (0, 1))
    print([(line["sites"], line["waited_seconds"]) for line in of_fast])
    print([(line["outer_step"], line["sites"], line["waited_seconds"]) for line in of_slow])
    # One for every window, though the slow site makes fewer of them.
    assert [line["step"] for line in of_fast] == list(range(50, steps + 1, 50))
    alone = [line for line in of_fast if line["sites"] == [0]]
    assert len(alone) >= 3
    assert len(of_slow) < len(of_fast)
    # From the first outer step on that it was slow in: the one before waits for both to start.
    assert max(line["waited_seconds"] for line in of_fast[2:]) < window + 1.5
    # And only where the slow site has been heard of since.
    assert len([line for line in alone if line["waited_seconds"] > window / 2]) <= len(of_slow)
    lab.end("hub", signal.SIGTERM)
    for record in rounds(lab.folder / "state")[1:]:
        assert record["tokens"].keys() == {str(site) for site in record["sites"]}
        assert record["sites"] in ([0], [0, 1])
    told = {(one["event"], one["who"], one["reason"]) for one in events(lab.folder / "0")}
    assert ("site_left_out", "site 1", "missed the outer step") in told
    assert ("site_left_out", "site 1", "late") in told  # and is waited for again
    assert ("site_left_out", "site 1") in {
        (one["event"], one["who"]) for one in events(lab.folder / "1")
    }
    assert "site 1 missed outer step" in lab.text("hub")
    assert "missed outer step" in lab.text("1")


def test_a_site_ten_times_slower_takes_part_in_an_asynchronous_server(lab: Lab) -> None:
    """Nobody waits for it, and what it sends counts by its staleness."""
    lab.serve("--window-seconds", "2", "--asynchronous")
    for site in (0, 1):
        lab.train(site, LONG, "sites.timeout_seconds=30")
    lab.wait_for_steps("0")
    lab.wait_for_steps("1", 1)
    before = len([one for one in lab.outer_steps() if one[1] == "1"])

    def delivered() -> bool:
        return len([one for one in lab.outer_steps() if one[1] == "1"]) >= before + 2

    paused(lab.running["s1"], delivered)
    for name in ("s0", "s1"):
        assert lab.end(name, signal.SIGTERM) == 75
    lab.end("hub", signal.SIGTERM)
    records = rounds(lab.folder / "state")
    slow = [record["share"] for record in records if record["sites"] == [1]]
    assert min(slow) < (1 + 3) ** -0.5 / 2  # relative to weights of more than 3 outer steps ago
    fast = [record["share"] for record in records if record["sites"] == [0]]
    assert sorted(fast)[len(fast) // 2] > min(slow)
