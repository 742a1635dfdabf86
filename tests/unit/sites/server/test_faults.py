"""An outer server in trouble: full disks, damaged files, values and numbers that it cannot use."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bigtrain.sites.codecs import CODECS
from bigtrain.sites.rectangles import Box
from bigtrain.sites.server.ledger import Ledger, RefusedError, Rules
from bigtrain.sites.server.storage import Storage
from tests.unit.sites.server.test_ledger import (
    SHAPES,
    Site,
    changed,
    ledger_at,
    quiet,
    start,
)


class Trouble(Storage):
    """A disk that is full for the next so many writes of a kind."""

    failing: ClassVar[Counter[str]] = Counter()

    def _fail(self, name: str) -> None:
        if self.failing[name]:
            self.failing[name] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_state(self, tensors: Any, record: Any) -> None:
        self._fail("state")
        super().write_state(tensors, record)

    def _write_line(self, line: str) -> None:
        self._fail("line")
        super()._write_line(line)

    def write_active(self, sites: set[int]) -> None:
        self._fail("active")
        super().write_active(sites)

    def deliver(self, site: int, delivery: Any) -> None:
        self._fail("deliver")
        super().deliver(site, delivery)


@pytest.mark.parametrize("kind", ["state", "line", "active", "nothing"])
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_full_disk_delays_a_step_and_loses_nothing(codec: str, kind: str, tmp_path: Path) -> None:
    """Bit for bit the weights of a server that had room; memory is never ahead of the disk."""
    said: list[str] = []
    ends = []
    for troubled in (False, True):
        directory = tmp_path / str(troubled)
        ledger = Ledger(Trouble(directory), Rules(False, 1000.0), said.append)
        sites = [Site(ledger, 0, codec), Site(ledger, 1, codec)]
        for site in sites:
            site.join(start())
        for number in range(3):
            sites[0].deliver(changed(sites[0].weights, 2 * number))
            Trouble.failing = Counter({kind: 2} if troubled else {})
            state = sites[1].deliver(changed(sites[1].weights, 2 * number + 1))
            on_disk = Storage(directory).read_state()
            assert on_disk is not None
            assert on_disk[1]["number"] == ledger.state()["number"] == state["number"]
            ledger.tick()
            ledger.tick()
            assert ledger.state()["number"] == number + 1
            for site in sites:
                site.take("full")
        lines = [json.loads(one) for one in (directory / "steps.jsonl").read_text().splitlines()]
        assert [line["number"] for line in lines] == [0, 1, 2, 3]
        ends.append(sites[0].weights)
        assert not list(directory.glob("*.partial"))
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name])
    if kind in ("state", "line"):
        text = "outer step 1 could not be made: OSError(28, 'No space left on device')"
        assert said.count(f"{text}; it is tried again") == 1


def test_a_delivery_that_is_not_on_disk_is_not_in_memory(tmp_path: Path) -> None:
    ledger = Ledger(Trouble(tmp_path), Rules(False, 1000.0), quiet)
    site = Site(ledger, 0, "float32")
    site.request["sites"]["count"] = 1
    site.join(start())
    Trouble.failing = Counter({"deliver": 1})
    attempt = site.send(changed(site.weights, 1))
    with pytest.raises(OSError, match="No space left"):
        ledger.deliver(0, site.delivery(attempt))
    assert ledger.state()["number"] == 0
    assert ledger.deliver(0, site.delivery(attempt))["number"] == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
def test_values_that_are_not_finite_or_too_large_are_refused_and_the_site_left_out(
    codec: str, bad: float, tmp_path: Path
) -> None:
    said: list[str] = []
    ledger = ledger_at(tmp_path, say=said.append)
    sites = [Site(ledger, index, codec) for index in range(2)]
    for site in sites:
        site.join(start())
    assert sites[0].deliver(changed(sites[0].weights, 1))["number"] == 0
    local = changed(sites[1].weights, 2)
    local["a.weight"].view(-1)[3] = bad
    with pytest.raises(RefusedError, match=r"site 1 sent .*: it is left out"):
        sites[1].deliver(local)
    state = ledger.state()  # which does not wait for it
    assert (state["number"], state["sites"]) == (1, [0])
    assert ("site_left_out", "site 1") in {(e["event"], e["who"]) for e in state["events"]}
    assert any(text.startswith("site 1 is left out of outer step 1: it sent ") for text in said)
    on_disk = Storage(tmp_path).read_state()
    assert on_disk is not None
    assert all(tensor.isfinite().all() for tensor in on_disk[0].values())
    # With good values it is back.
    for site in sites:
        site.take("full")
    sites[1].errors = [torch.zeros_like(error) for error in sites[1].errors]
    assert sites[1].deliver(changed(sites[1].weights, 4))["number"] == 1
    assert sites[0].deliver(changed(sites[0].weights, 3))["sites"] == [0, 1]


def test_what_makes_a_step_fail_is_set_aside_also_after_a_restart(tmp_path: Path) -> None:
    """A file that is damaged on the disk after it was confirmed; and tokens as an older server
    took them."""
    for name, spoil in {
        "damaged": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        "gone": lambda path: path.unlink(),
        "tokens": lambda path: _replace_json(path.parents[1] / "delivered.json", tokens=10**30),
        "no delivery": lambda path: (path.parents[1] / "delivered.json").write_text("{"),
    }.items():
        for restarts in (False, True):
            said: list[str] = []
            directory = tmp_path / f"{name} {restarts}"
            ledger = ledger_at(directory, say=said.append)
            sites = [Site(ledger, 0, "int8"), Site(ledger, 1, "int8")]
            for site in sites:
                site.join(start())
            sites[1].deliver(changed(sites[1].weights, 1))
            spoil(next(p for p in (directory / "pending/1").glob("*/*")))
            if restarts:
                ledger = ledger_at(directory, say=said.append)
                sites[0].ledger = ledger
            elif name in ("tokens", "no delivery"):
                continue  # of which memory has a copy
            state = sites[0].deliver(changed(sites[0].weights, 2))
            assert (state["number"], state["sites"]) == (1, [0]), said
            assert any(text.startswith("site 1 is left out of outer step 1") for text in said)
            assert (directory / "set_aside/1").is_dir()
            assert ledger_at(directory).state()["number"] == 1


def _replace_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_initial_weights_may_be_sent_again_and_gaps_are_refused(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path)
    site = Site(ledger, 0, "float32", halves=True)
    assert ledger.join(0, site.request)["uploads"]
    weights = start()

    def upload(rank: int, by: float = 0.0) -> None:
        boxes = site.boxes[rank]
        flat = torch.cat([box.of(weights[box.name]).reshape(-1) + by for box in boxes])
        header = {"boxes": [box.to_json() for box in boxes]}
        ledger.upload(header, memoryview(flat.numpy().tobytes()))

    upload(0)
    upload(0)  # its reply was lost
    with pytest.raises(RefusedError, match="came twice, with other values"):
        upload(0, by=1.0)
    with pytest.raises(RefusedError, match="of 359 initial weights came"):
        ledger.uploaded()
    # Killed there, it begins again, here with other values and in another order.
    assert ledger.join(0, site.request)["uploads"]
    weights = changed(weights, 5)
    for rank in (1, 0):
        upload(rank)
    with pytest.raises(RefusedError, match="not finite"):
        upload(0, by=float("nan"))
    ledger.uploaded()
    ledger.uploaded()
    site.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    site.take("full")
    for name, weight in weights.items():
        assert torch.equal(site.weights[name], weight)


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([Box("c.weight", (0, 0, 0), (2, 3, 4))], "elements of c.weight came twice"),
        ([Box("b.weight", (0,), (150,))], "elements of b.weight came twice"),
    ],
)
def test_a_delivery_with_overlaps_is_refused(boxes: list[Box], reason: str, tmp_path: Path) -> None:
    """Beside a gap of as many elements, and without one."""
    ledger = ledger_at(tmp_path)
    site = Site(ledger, 0, "float32")
    site.join(start())
    if boxes[0].name == "b.weight":
        full = [box for box in site.boxes[0] if box.name != "b.weight"]
        site.boxes[0] = [*full, Box("b.weight", (0,), (150,))]
    site.boxes.append(boxes)
    site.errors.append(torch.empty(0))
    with pytest.raises(RefusedError, match=reason):
        site.deliver(changed(site.weights, 1))


def test_numbers_out_of_range_are_refused_at_the_door(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path)
    site = Site(ledger, 0, "float32")
    with pytest.raises(RefusedError, match=r"sites\.index = 999: sites\.count = 2 has 0 to 1"):
        ledger.join(999, site.request)
    site.join(start())
    attempt = site.send(changed(site.weights, 1))
    for change in (
        {"tokens": 10**30},
        {"tokens": 0},
        {"step": 10**12},
        {"step": -1},
        {"num_messages": 0},
        {"base": 10**400},
    ):
        with pytest.raises(RefusedError, match=f"{next(iter(change))} = "):
            ledger.deliver(0, site.delivery(attempt) | change)
    for act in (lambda: ledger.deliver(2, site.delivery(attempt)), lambda: ledger.leave(-1)):
        with pytest.raises(RefusedError, match=r"sites\.count = 2"):
            act()
    assert ledger.deliver(0, site.delivery(attempt))["number"] == 0


def test_a_delivery_that_was_used_is_not_used_again_after_a_restart(tmp_path: Path) -> None:
    """Killed after a step was on disk and before its delivery was removed, by staleness."""

    class Keeping(Storage):
        def forget(self, site: int) -> None:
            pass

    ledger = Ledger(Keeping(tmp_path), Rules(True, 1000.0), quiet)
    site = Site(ledger, 0, "float32")
    site.request["sites"]["count"] = 1
    site.join(start())
    assert site.deliver(changed(site.weights, 1))["number"] == 1
    again = ledger_at(tmp_path, asynchronous=True)
    again.tick()
    assert again.state()["number"] == 1
