"""Processes that meet before they train, and those that never come (here: threads, one store)."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from bigtrain.engine.startup import rendezvous
from bigtrain.engine.startup.rendezvous import all_ranks_joined
from bigtrain.errors import LaunchError
from bigtrain.system.listening import listen_only_at
from bigtrain.system.world import World
from tests.support.worlds import free_port, run_world

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    port = str(free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return f"127.0.0.1:{port}"


def meet(ranks: Iterable[int], size: int, timeout_seconds: float) -> dict[int, str]:
    """What each of `ranks` ended with: "" inside the context, or the error."""
    said = {}
    everyone_is_in = threading.Barrier(len(list(ranks)))

    def come(rank: int) -> None:
        try:
            with all_ranks_joined(World(rank, size, rank), timeout_seconds):
                everyone_is_in.wait(timeout=30)
                said[rank] = ""
        except LaunchError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return said


def test_one_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until rank 2 has joined, and then after the timeout."""
    is_waited_for, has_joined = threading.Event(), threading.Event()
    wait_for_main, wait_for_all = rendezvous._wait_for_main, rendezvous._wait_for_all

    def wait(store: dist.TCPStore, timeout_seconds: float) -> str:
        assert is_waited_for.wait(30)
        has_joined.set()
        return wait_for_main(store, timeout_seconds)

    def wait_for_ranks(store: dist.TCPStore, world: World, end: float) -> str:
        is_waited_for.set()
        return wait_for_all(store, world, end)

    clock = SimpleNamespace(monotonic=lambda: 61.0 * has_joined.is_set(), sleep=time.sleep)
    monkeypatch.setattr(rendezvous, "_wait_for_main", wait)
    monkeypatch.setattr(rendezvous, "_wait_for_all", wait_for_ranks)
    monkeypatch.setattr(rendezvous, "time", clock)
    said = meet((0, 2), 4, timeout_seconds=60)
    joined = f"joined: {HOST} (rank 0, 2)"
    assert said[0].startswith(f"2 of 4 ranks have not joined: rank 1, 3; {joined} -> ")
    assert said[2] == said[0]


def test_the_main_rank_does_not_join(address: str) -> None:
    said = meet((1,), 2, timeout_seconds=0.05)
    assert said[1].startswith(f"the main rank, {address} (MASTER_ADDR, MASTER_PORT), cannot be")
    assert HOST in said[1]


def test_nobody_is_waited_for_under_torchruns_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meet((1,), 2, timeout_seconds=0.5) == {1: ""}


@pytest.mark.parametrize("size", [1, 2])
def test_the_store_listens_at_the_address_alone_that_all_know(size: int) -> None:
    port = int(os.environ["MASTER_PORT"])
    addresses: list[set[str]] = []
    barrier = threading.Barrier(size)

    def come(rank: int) -> None:
        with all_ranks_joined(World(rank, size, rank), 60):
            barrier.wait(timeout=30)
            sockets = psutil.Process().net_connections(kind="inet")
            places = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
            addresses.append({place.ip for place in places if place.port == port})
            barrier.wait(timeout=30)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert addresses == [{"127.0.0.1"}] * size


@pytest.mark.parametrize(
    "address",
    [
        HOST,  # by a name, other hosts may know another address of this machine
        "198.51.100.7",  # behind a translating router, it is none of this machine's
    ],
)
def test_where_others_may_know_another_address_every_one_is_listened_at(address: str) -> None:
    assert listen_only_at(address, 0) is None


WORLD = """
import os, psutil
from bigtrain.engine.startup.process_group import process_group
from bigtrain.run.health.status_store import open_status_store
from bigtrain.system.world import read_world

world = read_world(os.environ)
with process_group(world):
    assert open_status_store(world) is not None
    sockets = psutil.Process().net_connections(kind="inet")
    print("LISTENING", *(s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN))
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_a_world_on_this_machine_is_reached_from_this_machine_alone() -> None:
    lines = run_world(2, ["-c", WORLD]).splitlines()
    places = [place for line in lines if line.startswith("LISTENING") for place in line.split()[1:]]
    assert len(places) >= 3  # the store, and gloo in both processes
    assert set(places) == {"127.0.0.1"}
