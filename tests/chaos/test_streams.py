"""A run on a stream of samples of user code that is killed, rolled back or set right: its stream
continues with exactly the next sample, and it ends as the run that nobody disturbed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import (
    STEPS,
    arguments,
    assert_same_run,
    complete,
    events,
    losses,
    run_until_killed,
)
from tests.chaos.test_kills import survive
from tests.support.lives import Server
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

SAMPLES_PER_STEP = 4
STREAM = "tests.support.streams:Shuffled"


@pytest.fixture(scope="session")
def stream_yaml(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on a stream with a shuffle buffer."""
    tree = yaml.safe_load(run_yaml.read_text())
    tree["data"]["samples"] = {"type": STREAM}
    path = tmp_path_factory.mktemp("stream") / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="session")
def undisturbed(
    server: Server, stream_yaml: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run on a stream that nobody disturbed."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    complete(server, arguments(stream_yaml, run))
    return run


def position(run: Path, step: int = STEPS) -> dict[str, Any]:
    """Return the position of the stream in a checkpoint, which is that of its samples."""
    state = checkpoints.read_state(checkpoints.find(run, step))
    stream: dict[str, Any] = state["stream"]
    assert stream["sample"] == stream["state"]["given"] == state["samples"]
    return stream


def assert_same_stream(run: Path, reference: Path) -> None:
    assert_same_run(run, reference)
    assert position(run) == position(reference)


@pytest.mark.slow
def test_a_killed_run_ends_as_the_one_nobody_killed(
    server: Server, stream_yaml: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    survive(server, stream_yaml, run, num_kills=4, seed=2)
    assert_same_stream(run, undisturbed)


@pytest.mark.slow
def test_a_stream_resumes_from_memory(
    server: Server, stream_yaml: Path, undisturbed: Path, memory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    own = ["every_steps=null", "keep_every_steps=null", "memory.every_steps=1"]
    own = [f"checkpoint.{one}" for one in (*own, f"memory.directory={memory}")]
    words = arguments(stream_yaml, run, *own)
    run_until_killed(server, words, die=(1, 20))
    assert checkpoints.list_steps(run) == []
    text = complete(server, words)
    [line] = [line for line in text.splitlines() if "resumed at step" in line]
    assert str(memory) in line
    assert_same_stream(run, undisturbed)


@pytest.mark.slow
def test_a_rollback_continues_with_samples_that_were_not_read(
    server: Server, stream_yaml: Path, tmp_path: Path
) -> None:
    """Also a run that resumes from a checkpoint after it."""
    run, again = tmp_path / "run", tmp_path / "again"
    words = ["guard.max_consecutive=3", "checkpoint.every_steps=1", "checkpoint.keep_last=1",
             "checkpoint.keep_every_steps=12"]  # fmt: skip
    bad = {"rank": 1, "steps": dict.fromkeys(("9", "10", "11"), "nan")}
    complete(server, arguments(stream_yaml, run, *words), spoil=bad)
    [back] = events(run, "rolled_back")
    assert back["to_step"] == 8
    assert position(run)["sample"] == (STEPS + 3) * SAMPLES_PER_STEP
    shutil.copytree(run, again)
    checkpoints.remove(checkpoints.checkpoint_path(again, STEPS))
    text = complete(server, arguments(stream_yaml, again, *words))
    assert "resumed at step 12 " in text
    assert_same_stream(again, run)


@pytest.mark.slow
def test_replicas_that_differ_read_their_samples_again(
    server: Server, stream_yaml: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = arguments(stream_yaml, run, "guard.compare_every_steps=1")
    flip = {"rank": 1, "steps": {"13": "parameter bit"}}
    complete(server, words, spoil=flip)
    [event] = events(run, "replicas_differed")
    assert (event["step"], event["to_step"]) == (13, 12)
    assert_same_stream(run, undisturbed)


PARALLEL = {
    "pipeline 2": ["parallel.pipeline=2", "--deepspeed_config", "zero1"],
    "sequence 2": ["parallel.sequence=2", "--deepspeed_config", "zero2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARALLEL)
def test_a_stream_at_other_degrees(
    server: Server, stream_yaml: Path, undisturbed: Path, tmp_path: Path, name: str
) -> None:
    """Trained in two launches. A run without dropout, whose masks depend on the degrees."""
    plain = ["model.config.attention_dropout=0.0", "train.steps=8"]
    reference, run = tmp_path / "reference", tmp_path / "run"
    complete(server, arguments(stream_yaml, reference, *plain), world_size=1)
    more = [*plain, *PARALLEL[name], "checkpoint.allow_changes=[train.steps]"]
    words = arguments(stream_yaml, run, *more)
    complete(server, [*words, "train.steps=4"])
    text = complete(server, words)
    assert "resumed at step 4 " in text
    assert position(run, 8) == position(reference, 8)
    assert losses(run) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fault": "other", "ranks": [1]}, "the items before 32 are others on rank 1 (checksum "),
        *(
            pytest.param(settings, said, marks=pytest.mark.slow)
            for settings, said in (
                ({"fault": "other", "ranks": [0], "at": 3}, "its first items are others on rank 1"),
                ({"fault": "raises", "ranks": [0]}, "item 30 raised RuntimeError: a shard of mine"),
                ({"fault": "item"}, "item 30 input_ids is of type float64 and shape [2]"),
                ({"fault": "ends", "at": 30}, "the stream ended after 30 items, and the run needs"),
            )
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_stream_that_fails_is_one_error_with_its_class_and_file(
    server: Server, stream_yaml: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """Before a checkpoint contains what ranks have read differently."""
    run = tmp_path / "run"
    own = [f"data.samples.settings={json.dumps(settings)}", "checkpoint.every_steps=8"]
    codes, text = server.live(arguments(stream_yaml, run, *own))
    assert 2 in codes, text
    assert codes != [2, 2] or "Traceback" not in text  # others notice that a rank is gone
    [line] = {line.partition(" (rank ")[0] for line in text.splitlines() if said in line}
    assert f"data.samples.type = '{STREAM}'" in line
    assert f"{ROOT}/tests/support/streams.py:" in line
    assert checkpoints.list_steps(run) == []
