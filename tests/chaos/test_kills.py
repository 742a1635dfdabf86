"""A run that is killed, again and again, anywhere: what comes out is the run nobody killed."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import arguments, assert_same_run, complete
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

# A save with its retention makes about 40 operations on the main process, and 3 on another.
MOST_OPERATIONS = {0: 160, 1: 12}


def kill_within_operation(
    server: Server, words: list[str], chooser: random.Random
) -> tuple[list[int], str]:
    """A process kills itself as it saves, commits, deletes or looks for checkpoints."""
    rank = chooser.choice([0, 0, 1])
    number = chooser.randint(1, MOST_OPERATIONS[rank])
    return server.live(words, die=(rank, number))


def kill_any_time(
    server: Server, words: list[str], chooser: random.Random, run: Path
) -> tuple[list[int], str]:
    """One process or all of them are killed at a moment that has to do with nothing."""
    return server.live(
        words,
        send={
            "log": str(run / "log.txt"),
            "delay_seconds": chooser.uniform(0, 1.0),
            "ranks": chooser.choice([[0, 1], [0], [1]]),
            "signal": signal.SIGKILL,
            "times": 1,
        },
    )


def survive(server: Server, run_yaml: Path, run: Path, num_kills: int, seed: int) -> list[str]:
    """Kill the run `num_kills` times, then let it end; what it said in its last life."""
    chooser = random.Random(seed)
    words = arguments(run_yaml, run)
    for number in range(num_kills):
        if number % 3 == 2:
            codes, text = kill_any_time(server, words, chooser, run)
        else:
            codes, text = kill_within_operation(server, words, chooser)
        assert codes == [0, 0] or -signal.SIGKILL in codes, text
        assert "is corrupt" not in text, text
        for step in checkpoints.list_steps(run):
            directory = checkpoints.checkpoint_path(run, step)
            assert checkpoints.find_corruption(directory, "all") is None
        if codes == [0, 0]:
            break
    text = complete(server, words)
    return text.splitlines()


def assert_tidy(run: Path) -> None:
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {f"step-{step:08d}" for step in (8, 16, 22, 24)}


def test_killed_run_ends_as_the_run_nobody_killed(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    survive(server, run_yaml, run, num_kills=1, seed=1)
    assert_same_run(run, uninterrupted)
    assert_tidy(run)


@pytest.mark.slow
def test_killed_run_ends_as_the_run_nobody_killed_many_times(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    survive(server, run_yaml, run, num_kills=12, seed=2)
    assert_same_run(run, uninterrupted)
    assert_tidy(run)


@pytest.mark.slow
def test_what_a_kill_after_the_last_checkpoint_left_is_removed(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    """Retention comes after a checkpoint is complete; a kill between the two leaves older ones, and
    one while it removes them a part of one."""
    run = tmp_path / "run"
    complete(server, arguments(run_yaml, run, "checkpoint.keep_last=4"))
    assert checkpoints.list_steps(run) == [8, 16, 18, 20, 22, 24]
    text = complete(server, arguments(run_yaml, run))
    assert "nothing to do" not in text
    assert_tidy(run)
    (run / "checkpoints/step-00000020.removed-1/tensors").mkdir(parents=True)
    text = complete(server, arguments(run_yaml, run))
    assert "nothing to do" not in text
    assert_tidy(run)
    _, text = server.live(arguments(run_yaml, run))
    assert "nothing to do" in text


@pytest.mark.parametrize(
    "received",
    [
        signal.SIGTERM,
        *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGUSR1, signal.SIGINT)),
    ],
)
def test_signal_to_one_process_saves_and_stops_all(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path, received: signal.Signals
) -> None:
    run = tmp_path / "run"
    words = arguments(run_yaml, run)
    send = {"log": str(run / "log.txt"), "delay_seconds": 0, "ranks": [1], "signal": received}
    codes, text = server.live(words, send={**send, "times": 3})  # the others change nothing
    assert codes == [75, 75], text
    [step] = [int(line.split()[5]) for line in text.splitlines() if "stopped by" in line]
    assert f"stopped by {received.name} after step {step} of 24" in text
    assert checkpoints.list_steps(run)[-1] == step < 24
    assert (run / "requeue").exists() == (received != signal.SIGINT)
    text = complete(server, words)
    assert f"resumed at step {step} " in text
    assert not (run / "requeue").exists()
    assert_same_run(run, uninterrupted)
