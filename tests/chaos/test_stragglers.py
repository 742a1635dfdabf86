"""A process that computes more slowly than its peers is named."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.chaos.conftest import arguments, events
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.mark.parametrize("engine", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_slow_process_is_named(
    server: Server, run_yaml: Path, tmp_path: Path, engine: str
) -> None:
    run = tmp_path / "run"
    words = arguments(run_yaml, run, "watchdog.straggler_seconds=0.2", "--deepspeed_config", engine)
    codes, text = server.live(words, slow={"rank": 1, "seconds": 0.01})
    assert codes == [0, 0], text
    found = events(run, "straggler")
    assert found
    assert {(event["rank"], event["host"]) for event in found} == {(1, socket.gethostname())}
    assert all(event["work_seconds"] > 1.5 * event["median_seconds"] for event in found)
    assert f"rank 1 on {socket.gethostname()} is slow: " in text
