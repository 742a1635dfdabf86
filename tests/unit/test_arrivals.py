"""Processes that meet before they train, and those that never come (here: threads, one store)."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable

import pytest

from bigtrain.engine.arrivals import all_arrived
from bigtrain.errors import LaunchError
from bigtrain.world import World
from tests.support.worlds import free_port

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    port = str(free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return f"127.0.0.1:{port}"


def meet(ranks: Iterable[int], size: int, patience_seconds: float) -> dict[int, str]:
    """What each of `ranks` ended with: "" inside the context, or the error."""
    said = {}
    everyone_is_in = threading.Barrier(len(list(ranks)))

    def come(rank: int) -> None:
        try:
            with all_arrived(World(rank, size, rank), patience_seconds):
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


def test_all_come() -> None:
    assert meet(range(3), 3, patience_seconds=60) == {0: "", 1: "", 2: ""}


def test_one_does_not_come() -> None:
    said = meet((0, 2), 4, patience_seconds=0.5)
    came = f"here are {HOST} (rank 0, 2)"
    assert said[0].startswith(f"2 of 4 processes have not come: rank 1, 3; {came} -> ")
    assert said[2] == said[0]


def test_the_main_process_does_not_come(address: str) -> None:
    said = meet((1,), 2, patience_seconds=0.5)
    assert said[1].startswith(f"the main process, {address} (MASTER_ADDR, MASTER_PORT), cannot be")
    assert HOST in said[1]


def test_nobody_is_waited_for_under_torchruns_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCHELASTIC_USE_AGENT_STORE", "True")
    assert meet((1,), 2, patience_seconds=0.5) == {1: ""}
