"""An outer server in trouble: full disks, damaged files, values and numbers that it cannot use."""

from __future__ import annotations

import errno
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bigtrain.errors import LaunchError
from bigtrain.sites.protocol import HEARTBEAT_TIMEOUT, RefusedError
from bigtrain.sites.rectangles import ParameterBox
from bigtrain.sites.server import store
from bigtrain.sites.server.members import RECONNECT_SECONDS, Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import ServerDirectory
from bigtrain.system.files import sync_to_disk
from tests.unit.sites.server.test_deliveries import (
    SHAPES,
    Site,
    changed,
    joined,
    ledger_at,
    quiet,
    start,
)


class Trouble(ServerDirectory):
    """A disk that is full for the next so many writes of a kind: state files, messages, or the
    database before or while a transaction is committed."""

    failing: ClassVar[Counter[str]] = Counter()

    def fail(self, name: str) -> None:
        if self.failing[name]:
            self.failing[name] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_step(self, *arguments: Any, **more: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "sync_to_disk", self._sync)
            super().write_step(*arguments, **more)

    def _sync(self, path: Path) -> None:
        self.fail("state")
        sync_to_disk(path)

    def write_site(self, row: Any) -> None:
        self.fail("row")
        super().write_site(row)

    def deliver(self, delivery: Any) -> None:
        self.fail("deliver")
        super().deliver(delivery)

    def _commit(self) -> None:
        self.fail("commit")
        super()._commit()


class PatientSite(Site):
    """Asks again where it is told to, as `ServerClient` does."""

    def ask(self, action: str, payload: bytes = b"", **header: Any) -> Any:
        for _ in range(9):
            with suppress(OSError):
                return super().ask(action, payload, **header)
        raise AssertionError


@pytest.mark.parametrize(
    ("codec", "kind"), [("float32", "state"), ("int8", "row"), ("int8", "commit")]
)
def test_a_full_disk_delays_a_step_and_loses_nothing(codec: str, kind: str, tmp_path: Path) -> None:
    """Bit for bit the weights of a server that had room; memory is never ahead of the disk."""
    said: list[str] = []
    ends = []
    for troubled in (False, True):
        directory = tmp_path / str(troubled)
        disk = Trouble(directory)
        ledger = OuterServerState(disk, Rules(False, 1000.0), said.append)
        sites = [PatientSite(ledger, index, codec) for index in range(2)]
        for site in sites:
            site.join(start())
        for number in range(3):
            sites[0].deliver(changed(sites[0].weights, 2 * number))
            Trouble.failing = Counter({kind: 3} if troubled else {})
            sites[1].deliver(changed(sites[1].weights, 2 * number + 1))
            record = disk.record()
            assert record is not None
            assert record["number"] == ledger.summary()["number"]
            assert ledger.exchange is not None
            assert ledger.exchange._weights.number == record["number"]  # type: ignore[union-attr]
            for _ in range(3):
                ledger.tick()
            assert ledger.summary()["number"] == number + 1
            for site in sites:
                site.take("full")
        assert [line["number"] for line in disk.records_after(-1)] == [0, 1, 2, 3]
        ends.append(sites[0].weights)
        assert len(list(directory.glob("state-*"))) == 1
        assert not list(directory.glob("*/*"))
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name])
    if kind in ("state", "row"):
        text = "the next outer step could not be made: OSError(28, 'No space left on device')"
        assert said.count(f"{text}; it is repeated until it succeeds") == 3


def test_a_commit_that_fails_after_it_was_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a sync that fails: the database is opened again, and asked."""
    disk = ServerDirectory(tmp_path)
    plain = disk._connection

    class Connection:
        """Commits, and says that it has not; or rolls back, and says that it failed."""

        def __init__(self, is_written: bool) -> None:
            self.is_written = is_written

        def execute(self, sql: str, *values: Any) -> Any:
            if sql == "COMMIT":
                plain.execute("COMMIT" if self.is_written else "ROLLBACK")
                raise sqlite3.OperationalError("disk I/O error")
            return plain.execute(sql, *values)

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

    for is_written in (True, False):
        plain = disk._connection
        monkeypatch.setattr(disk, "_connection", Connection(is_written))
        if is_written:
            disk.write_run({"number": 1})
        else:
            with pytest.raises(OSError, match="disk I/O error"):
                disk.write_run({"number": 2})
        assert disk.run() == {"number": 1}
        assert isinstance(disk._connection, sqlite3.Connection)


def test_a_directory_has_one_server_of_this_version(tmp_path: Path) -> None:
    with (
        closing(ServerDirectory(tmp_path)),
        pytest.raises(LaunchError, match="another server uses"),
    ):
        ServerDirectory(tmp_path)
    ServerDirectory(tmp_path).close()
    (tmp_path / "server.sqlite").write_bytes(b"x" * 4096)
    with pytest.raises(LaunchError, match="is not a database"):
        ServerDirectory(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(
        LaunchError, match=r"of an earlier version of bigtrain \(it has a run\.json"
    ):
        ServerDirectory(tmp_path)


def test_a_delivery_that_is_not_on_disk_is_not_in_memory(tmp_path: Path) -> None:
    ledger = OuterServerState(Trouble(tmp_path), Rules(False, 1000.0), quiet)
    site = Site(ledger, 0, "float32")
    site.request["sites"]["count"] = 1
    site.join(start())
    Trouble.failing = Counter({"deliver": 1})
    attempt = site.send(changed(site.weights, 1))
    with pytest.raises(OSError, match="No space left"):
        site.ask("deliver", **site.delivery(attempt))
    assert ledger.summary()["number"] == 0
    assert site.ask("deliver", **site.delivery(attempt))["number"] == 1


@pytest.mark.parametrize(
    ("codec", "bad"),
    [
        *(("float32", bad) for bad in (float("nan"), float("inf"), 1e20)),
        ("bfloat16", float("inf")),
        *(("int8", bad) for bad in (float("nan"), 1e20)),
        ("int4", 1e20),
    ],
)
def test_values_that_are_not_finite_or_too_large_are_refused_and_the_site_left_out(
    codec: str, bad: float, tmp_path: Path
) -> None:
    said: list[str] = []
    ledger = ledger_at(tmp_path, say=said.append)
    sites = joined(ledger, codec)
    assert sites[0].deliver(changed(sites[0].weights, 1))["number"] == 0
    local = changed(sites[1].weights, 2)
    local["a.weight"].view(-1)[3] = bad
    with pytest.raises(RefusedError, match=r"site 1 sent .*: it is excluded"):
        sites[1].deliver(local)
    state = ledger.summary()  # which does not wait for it
    assert (state["number"], state["sites"]) == (1, [0])
    assert ("site_left_out", "site 1") in {(e["event"], e["who"]) for e in state["events"]}
    assert any(text.startswith("site 1 is excluded from outer step 1: it sent ") for text in said)
    on_disk = ledger.store.state()
    assert on_disk is not None
    assert all(tensor.isfinite().all() for tensor in on_disk.values())
    # With good values it is back.
    for site in sites:
        site.take("full")
    sites[1].errors = [torch.zeros_like(error) for error in sites[1].errors]
    assert sites[1].deliver(changed(sites[1].weights, 4))["number"] == 1
    assert sites[0].deliver(changed(sites[0].weights, 3))["sites"] == [0, 1]


@pytest.mark.parametrize(
    ("how", "restarts"),
    [
        *(("damaged", False), ("damaged", True)),
        *(("gone", True), ("tokens", True), ("no message", False)),
    ],
)
def test_what_makes_a_step_fail_is_discarded_also_after_a_restart(
    how: str, restarts: bool, tmp_path: Path
) -> None:
    """A file that is damaged on the disk after it was confirmed; and rows that no server wrote."""
    said: list[str] = []
    ledger = ledger_at(tmp_path, say=said.append)
    sites = joined(ledger, "int8")
    sites[1].deliver(changed(sites[1].weights, 1))
    (path,) = tmp_path.glob("parts/*")
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif how == "gone":
        path.unlink()
    else:
        sql = "UPDATE deliveries SET tokens = 10000000000000000"
        ledger.store._write(sql if how == "tokens" else "DELETE FROM parts")
    if restarts:
        ledger = ledger_at(tmp_path, say=said.append)
        sites[0].ledger = ledger
    state = sites[0].deliver(changed(sites[0].weights, 2))
    assert (state["number"], state["sites"]) == (1, [0]), said
    assert any(text.startswith("site 1 is excluded from outer step 1") for text in said)
    assert ledger_at(tmp_path).summary()["number"] == 1
    assert not list(tmp_path.glob("parts/*"))


def test_initial_weights_may_be_sent_again_and_gaps_are_refused(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path)
    site = Site(ledger, 0, "float32", halves=True)
    assert site.ask("join", **site.request)["uploads"]
    weights = start()

    def upload(rank: int, by: float = 0.0) -> None:
        boxes = site.boxes[rank]
        flat = torch.cat([weights[box.name][box.slices].reshape(-1) + by for box in boxes])
        header = {"boxes": [box.to_json() for box in boxes]}
        site.ask("upload", flat.numpy().tobytes(), **header)

    other = Site(ledger, 1, "float32")
    assert not other.ask("join", **other.request)["uploads"]
    with pytest.raises(RefusedError, match="site 1 was not asked for the initial weights"):
        other.ask("upload", bytes(4), boxes=[])
    upload(0)
    upload(0)  # its reply was lost
    with pytest.raises(RefusedError, match="came twice, with other values"):
        upload(0, by=1.0)
    with pytest.raises(RefusedError, match="of 359 initial weights came"):
        site.ask("uploaded")
    # Killed there, it begins again, here with other values and in another order.
    assert site.ask("join", **site.request)["uploads"]
    weights = changed(weights, 5)
    for rank in (1, 0):
        upload(rank)
    with pytest.raises(RefusedError, match="not finite"):
        upload(0, by=float("nan"))
    site.ask("uploaded")
    site.ask("uploaded")
    site.weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    site.take("full")
    for name, weight in weights.items():
        assert torch.equal(site.weights[name], weight)


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([ParameterBox((0, 0, 0), (2, 3, 4), "c.weight")], "elements of c.weight came twice"),
        ([ParameterBox((0,), (150,), "b.weight")], "elements of b.weight came twice"),
    ],
)
def test_a_delivery_with_overlaps_is_refused(
    boxes: list[ParameterBox], reason: str, tmp_path: Path
) -> None:
    """Beside a gap of as many elements, and without one."""
    ledger = ledger_at(tmp_path)
    site = Site(ledger, 0, "float32")
    site.join(start())
    if boxes[0].name == "b.weight":
        full = [box for box in site.boxes[0] if box.name != "b.weight"]
        site.boxes[0] = [*full, ParameterBox((0,), (150,), "b.weight")]
    site.boxes.append(boxes)
    site.errors.append(torch.empty(0))
    with pytest.raises(RefusedError, match=reason):
        site.deliver(changed(site.weights, 1))


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_delivery_whose_reply_was_lost_is_used_once(
    is_asynchronous: bool, tmp_path: Path
) -> None:
    """Also where the server was started again after the step: the site did take part."""
    ledger = ledger_at(tmp_path, asynchronous=is_asynchronous)
    site = Site(ledger, 0, "float32")
    site.request["sites"]["count"] = 1
    site.join(start())
    delivery = site.delivery(site.send(changed(site.weights, 1)))
    state = site.ask("deliver", **delivery)
    assert state["number"] == 1
    site.ledger = ledger_at(tmp_path, asynchronous=is_asynchronous)
    assert site.ask("deliver", **delivery) == state
    assert "late" not in state
    site.ledger.tick()
    assert site.ledger.summary()["number"] == 1


def test_a_site_that_is_lost_is_not_waited_for_until_the_window_ends(tmp_path: Path) -> None:
    """One that has not joined yet is."""
    now = [0.0]
    ledger = OuterServerState(
        ServerDirectory(tmp_path), Rules(False, 1000.0), quiet, lambda: now[0]
    )
    sites = [Site(ledger, index, "float32") for index in range(3)]
    for site in sites:
        site.request["sites"]["count"] = 3
    for site in sites[:2]:
        site.join(start())
    sites[0].deliver(changed(sites[0].weights, 0))
    now[0] += 2 * HEARTBEAT_TIMEOUT
    ledger.tick()
    assert ledger.summary()["number"] == 0
    sites[2].join(start())
    sites[1].ask("heartbeat")
    sites[1].deliver(changed(sites[1].weights, 1))
    now[0] += HEARTBEAT_TIMEOUT - 1
    ledger.tick()
    assert ledger.summary()["number"] == 0
    now[0] += 1
    ledger.tick()
    state = ledger.summary()
    assert (state["number"], state["sites"]) == (1, [0, 1])
    assert [event["who"] for event in state["events"]] == ["site 2"]
    assert sites[2].deliver(changed(sites[2].weights, 9))["late"]


@pytest.mark.parametrize("is_back", [False, True])
def test_a_site_whose_heartbeats_are_cut_off_has_a_short_time_to_come_back(
    is_back: bool, tmp_path: Path
) -> None:
    now = [0.0]
    ledger = OuterServerState(
        ServerDirectory(tmp_path), Rules(False, 1000.0), quiet, lambda: now[0]
    )
    sites = [Site(ledger, index, "float32") for index in range(2)]
    for index, site in enumerate(sites):
        site.request["run"] = f"{index:016x}"
        site.join(start())
    sites[0].deliver(changed(sites[0].weights, 0))
    ledger.hang_up(1, "f" * 16)  # not of its process
    now[0] += RECONNECT_SECONDS
    ledger.tick()
    assert ledger.summary()["number"] == 0
    ledger.hang_up(1, f"{1:016x}")
    if is_back:
        sites[1].ask("heartbeat")
    now[0] += RECONNECT_SECONDS
    ledger.tick()
    assert ledger.summary()["number"] == (0 if is_back else 1)
