"""A run that does not move: who keeps it, where it is, and that every process ends."""

from __future__ import annotations

import json
import re
import signal
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder.components.loader import read_dir

from bigtrain.errors import EXIT_HANG
from tests.chaos.conftest import arguments, assert_same_run, complete
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

HOST = socket.gethostname()
TIMEOUT_SECONDS = 5
TIMEOUT = f"watchdog.timeout_seconds={TIMEOUT_SECONDS}"
# Two micro-batches a step, and the probe of a save after the second step.
THIRD_STEP, SEVENTH_STEP = 6, 16


def hang(rank: int, how: str = "sleep", call: int = THIRD_STEP) -> dict[str, Any]:
    return {"rank": rank, "layer": 1, "call": call, "how": how}


def stop(run: Path, rank: int, number: signal.Signals, delay_seconds: float = 0) -> dict[str, Any]:
    """After the first steps, for which the limit is a long one; a line has some 200 bytes."""
    return {
        "log": str(run / "metrics.jsonl"),
        "after_bytes": 1000,
        "delay_seconds": delay_seconds,
        "ranks": [rank],
        "signal": number,
        "times": 1,
    }


def hang_directory(run: Path) -> Path:
    [directory] = (run / "hangs").iterdir()
    return directory


def assert_flight_recorder_reads(directory: Path) -> None:
    """By torch's own reader: both processes, and where in the step each began a collective."""
    details, _ = read_dir(Namespace(prefix=None, trace_dir=str(directory)))
    assert {recording["rank"] for recording in details.values()} == {0, 1}
    for recording in details.values():
        entries = [e for e in recording["entries"] if e["profiling_name"].startswith("gloo:")]
        assert any("train_step" in [f["name"] for f in e["frames"]] for e in entries)


@pytest.mark.slow
def test_a_process_that_sleeps_in_a_layer_is_named(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    codes, text = server.live(arguments(run_yaml, run, TIMEOUT), hang=hang(0))
    assert codes == [EXIT_HANG, EXIT_HANG], text
    named = rf"  rank 0 on {HOST} \(process \d+\): step 3, forward pass, model.layers.1, "
    lagging = text.split("lagging:\n")[1].split("waiting:\n")
    assert re.match(named + "outside of collectives", lagging[0])
    assert re.match(rf"  rank 1 on {HOST} .*, in (all_)?reduce", lagging[1])
    idle = re.search(r"watchdog: no progress for (\d+) s", text)
    assert idle is not None
    assert TIMEOUT_SECONDS <= int(idle[1]) <= TIMEOUT_SECONDS + 10
    directory = hang_directory(run)
    assert directory.name.startswith("step-00000003-")
    assert (directory / "report.txt").read_text() in (run / "log.txt").read_text()
    for number in range(2):
        stack = (directory / f"rank-{number:05d}.txt").read_text()
        assert "fork_server.py" in stack
        assert ("distributed_c10d.py" in stack) == (number == 1)
    assert_flight_recorder_reads(directory)
    assert json.loads((run / "requeue").read_text()) == {"signal": "watchdog", "step": 3}
    complete(server, arguments(run_yaml, run, TIMEOUT))
    assert not (run / "requeue").exists()
    assert_same_run(run, uninterrupted)


def test_a_process_that_sleeps_is_named_and_all_end(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = arguments(run_yaml, run, "watchdog.timeout_seconds=2", "checkpoint.every_steps=100")
    codes, text = server.live(words, hang=hang(1))
    assert codes == [EXIT_HANG, EXIT_HANG], text
    assert re.search(rf"lagging:\n  rank 1 on {HOST} \(process \d+\): step 3, forward pass", text)
    assert "fork_server.py" in (hang_directory(run) / "rank-00001.txt").read_text()
    assert_flight_recorder_reads(hang_directory(run))
    assert json.loads((run / "requeue").read_text()) == {"signal": "watchdog", "step": 3}


@pytest.mark.slow
def test_a_stopped_process_is_named(server: Server, run_yaml: Path, tmp_path: Path) -> None:
    """As behind a cut link; with rank 0 the board is gone as well."""
    run = tmp_path / "run"
    # Without saves, for which the limit is the long one.
    words = arguments(run_yaml, run, TIMEOUT, "checkpoint.every_steps=100")
    codes, text = server.live(words, send=stop(run, 0, signal.SIGSTOP))
    assert codes == [-signal.SIGKILL, EXIT_HANG], text  # killed by the launcher
    assert f"lagging:\n  rank 0 on {HOST} or its store does not respond" in text
    assert (hang_directory(run) / "rank-00001.txt").exists()


@pytest.mark.slow
def test_a_process_held_in_c_code_is_named_and_ends(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # Its last look must be long after the first step or a save, for which the limit is long.
    words = arguments(run_yaml, run, TIMEOUT, "checkpoint.every_steps=100")
    slow = {"rank": 1, "seconds": 0.01}
    codes, text = server.live(words, hang=hang(1, "hold", call=41), slow=slow, grace_seconds=60)
    assert codes == [EXIT_HANG, 1], text
    assert f"lagging:\n  rank 1 on {HOST} does not respond" in text
    assert "Timeout (" in text  # faulthandler's, with the stack


@pytest.mark.slow
def test_nobody_outlives_a_killed_process(server: Server, run_yaml: Path, tmp_path: Path) -> None:
    """Without a launcher that ends the others: one sleeps, and hears nothing of it."""
    run = tmp_path / "run"
    codes, text = server.live(
        arguments(run_yaml, run, TIMEOUT),
        send=stop(run, 0, signal.SIGKILL, 1.0),
        hang=hang(1, call=SEVENTH_STEP),
        grace_seconds=60,
    )
    assert codes == [-signal.SIGKILL, EXIT_HANG], text


@pytest.mark.slow
def test_a_pipeline_stage_that_sleeps_is_named(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = arguments(
        run_yaml, run, TIMEOUT, "--deepspeed_config", "pipeline_zero1", "parallel.pipeline=2"
    )
    call = {"rank": 1, "layer": 1, "call": 12, "how": "sleep"}
    codes, text = server.live(words, hang=call)
    assert codes == [EXIT_HANG, EXIT_HANG], text
    named = rf"lagging:\n  rank 1 on {HOST} \(process \d+\): step \d, forward pass, model.layers.1"
    assert re.search(named, text)


@pytest.mark.slow
def test_the_watchdog_can_be_turned_off(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    complete(server, arguments(run_yaml, run, "watchdog.timeout_seconds=null"))
    assert_same_run(run, uninterrupted)
