"""Checkpoints in memory of two hosts, each a rank, with copies on the partner: what they take is
what is predicted, and a partner that receives slowly, or never, costs no step."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.run_prediction import predict_run
from bigtrain.run.checkpointing import checkpoints
from bigtrain.settings.resolve import resolve_run_files
from tests.chaos.conftest import assert_same_run, complete, run_until_killed
from tests.chaos.test_memory_checkpoints import (
    resumed,
    steps_in_memory,
    words,
)
from tests.support.lives import Server

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can give a process a host's name"),
]

LIMIT_SECONDS = 60.0
"""Of a life: far below the 30 minutes of a collective that waits for a partner."""


@pytest.fixture
def hosts(memory: Path) -> dict[str, Any]:
    """Two hosts, of which each process is on one. All see their memory at `memory` / shm."""
    for name in ("a", "b", "shm"):
        (memory / name).mkdir()
    return hosts_named(memory, "a", "b")


def hosts_named(memory: Path, *names: str) -> dict[str, Any]:
    folders = [str(memory / name) for name in names]
    return {"hosts": {"names": list(names), "memory": folders, "mount": str(memory / "shm")}}


def partner_words(run_yaml: Path, run: Path, memory: Path, *more: str) -> list[str]:
    return words(run_yaml, run, memory / "shm", "checkpoint.memory.copies=1", *more)


@pytest.mark.slow
def test_a_host_stores_what_is_predicted(
    server: Server,
    run_yaml: Path,
    memory: Path,
    hosts: dict[str, Any],
    tmp_path: Path,
) -> None:
    own = ["model.config.hidden_size=64", "model.config.intermediate_size=128"]
    own.append("engine.deepspeed_config=zero3")
    command = partner_words(run_yaml, tmp_path / "run", memory, *own)
    text = run_until_killed(server, command, die=(1, 60), **hosts)
    assert "too small" not in text
    run = resolve_run_files(str(run_yaml), command[2:], 2)
    prediction = predict_run(run, model_costs(run.config)[0], None, None, is_cpu=True)
    assert prediction.memory_checkpoints is not None
    newest = steps_in_memory(memory / "a")[-1]
    for host in ("a", "b"):
        [directory] = memory.glob(f"{host}/*/*/checkpoints/step-{newest:08d}")
        files = list((directory / "tensors").iterdir())
        assert len(files) == 2
        stored = 2 * sum(path.stat().st_size for path in files)  # with the one before
        assert prediction.memory_checkpoints.directory_bytes == pytest.approx(stored, rel=0.05)


@pytest.fixture
def killed(
    server: Server, run_yaml: Path, memory: Path, hosts: dict[str, Any], tmp_path: Path
) -> list[str]:
    """Arguments of a run that was killed with checkpoints in memory of both hosts only."""
    command = partner_words(run_yaml, tmp_path / "run", memory)
    run_until_killed(server, command, die=(1, 60), **hosts)
    return command


@pytest.mark.slow
def test_a_host_that_is_back_with_empty_memory_gets_its_part(
    server: Server,
    memory: Path,
    killed: list[str],
    hosts: dict[str, Any],
    tmp_path: Path,
    uninterrupted: Path,
) -> None:
    newest = steps_in_memory(memory / "a")[-1]
    for left in (memory / "b").iterdir():
        shutil.rmtree(left)
    text = complete(server, killed, **hosts)
    assert resumed(text)[0][0] == newest
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_lost_host_leaves_its_part_with_its_partner(
    server: Server, memory: Path, killed: list[str]
) -> None:
    newest = steps_in_memory(memory / "a")[-1]
    shutil.rmtree(memory / "b")
    text = complete(server, killed, world_size=1, **hosts_named(memory, "a"))
    assert resumed(text)[0][0] == newest


def skipped_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "in memory skipped" in line]


def totals(run: Path) -> dict[str, float]:
    """Blocked seconds, saves and skipped ones of all steps."""
    sums: dict[str, float] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for key, value in (line.get("memory_checkpoint") or {}).items():
            sums[key] = sums.get(key, 0.0) + value
    return sums


@pytest.mark.slow
def test_a_partner_that_receives_slowly_costs_no_step(
    server: Server,
    run_yaml: Path,
    memory: Path,
    hosts: dict[str, Any],
    tmp_path: Path,
    uninterrupted: Path,
) -> None:
    """Each copy takes a second longer, in which several steps are trained."""
    run, seconds = tmp_path / "run", 1.0
    receive = {"rank": 1, "copies": 0, "seconds": seconds}
    text = complete(server, partner_words(run_yaml, run, memory), receive=receive, **hosts)
    [line] = skipped_lines(text)
    assert "written and sent to the partner; this is logged once -> a larger" in line
    sums = totals(run)
    assert sums["skipped"] > 0
    assert sums["blocked_seconds"] < seconds
    assert not list((memory / "a").iterdir())
    assert not list((memory / "b").iterdir())
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_partner_that_stops_receiving_leaves_what_was_complete(
    server: Server,
    run_yaml: Path,
    memory: Path,
    hosts: dict[str, Any],
    tmp_path: Path,
    uninterrupted: Path,
    on_disk: bool,
) -> None:
    """A restart takes the last checkpoint that the partner has whole, or a newer one on disk."""
    run = tmp_path / "run"
    saves = ["checkpoint.every_steps=3", "checkpoint.keep_last=9"] if on_disk else []
    command = partner_words(run_yaml, run, memory, *saves)
    receive = {"rank": 1, "copies": 1, "seconds": None}
    kill = {"signal": signal.SIGKILL, "log": str(run / "metrics.jsonl"), "after_bytes": 6000}
    send = kill | {"delay_seconds": 0, "ranks": [0, 1], "times": 1}
    text = run_until_killed(server, command, receive=receive, send=send, **hosts)
    assert len(skipped_lines(text)) == 1
    [whole] = steps_in_memory(memory / "a")
    newest = max([whole, *checkpoints.list_steps(run)])
    assert (newest > whole) is on_disk
    text = complete(server, command, **hosts)
    [(step, directory)] = resumed(text)
    assert step == newest
    assert directory.startswith(str(run if on_disk else memory))
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_a_partner_that_never_receives_does_not_keep_a_run_from_its_end(
    server: Server,
    run_yaml: Path,
    memory: Path,
    hosts: dict[str, Any],
    tmp_path: Path,
    uninterrupted: Path,
) -> None:
    run, receive = tmp_path / "run", {"rank": 1, "copies": 0, "seconds": None}
    command = partner_words(run_yaml, run, memory)
    text = complete(server, command, receive=receive, limit_seconds=LIMIT_SECONDS, **hosts)
    assert len(skipped_lines(text)) == 1
    assert totals(run)["saved"] == 0
    assert not list((memory / "a").iterdir())
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_a_partner_that_never_receives_does_not_keep_a_run_from_rolling_back(
    server: Server, run_yaml: Path, memory: Path, hosts: dict[str, Any], tmp_path: Path
) -> None:
    bad = {"rank": 1, "steps": {str(number): "nan" for number in (9, 10)}}
    guard = ["guard.max_consecutive=2", "checkpoint.every_steps=4"]
    command = partner_words(run_yaml, tmp_path / "run", memory, *guard)
    receive = {"rank": 1, "copies": 0, "seconds": None}
    codes, text = server.live(
        command, receive=receive, spoil=bad, limit_seconds=LIMIT_SECONDS, **hosts
    )
    assert codes == [0, 0], text
    assert "rolled back to step 8" in text
    line = "a checkpoint in memory is still being written; from here on only the disk is used"
    assert text.count(line) == 1
    assert not list((memory / "a").iterdir())
