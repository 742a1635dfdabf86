"""A flipped bit on one rank that nothing else notices: it is named, and the steps are repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.errors import EXIT_FAULTY_HOST
from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import (
    STEPS,
    arguments,
    assert_same_run,
    complete,
    events,
    final_tensors,
    losses,
)
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

COMPARE = "guard.compare_every_steps"
LAST = 12
PAIR = [1, 3]
"""Ranks that hold the same part: one of them is wrong, and it is unknown which."""
CASES = {
    "zero0 gradient": (["zero0"], "gradient bit", [1]),
    "bf16 zero0": (["zero0", "precision.dtype=bfloat16"], "state bit", [1]),
    "bf16 zero2": (["zero2", "precision.dtype=bfloat16"], "parameter bit", [1]),
    "an expert": (["zero1", "parallel.expert=2"], "expert bit", PAIR),  # which two ranks hold
}


def flips(how: str, *steps: int) -> dict[str, Any]:
    return {"rank": 1, "steps": {str(step): how for step in steps}}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_flipped_bit_changes_nothing_in_the_end(
    server: Server, run_yaml: Path, experts_yaml: Path, tmp_path: Path, name: str
) -> None:
    (engine, *more), how, named = CASES[name]
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    size = 4 if named == PAIR or more else 3  # three are enough for two that are alike
    options = ["--deepspeed_config", engine, *more, f"train.steps={LAST}"]
    options.append(f"batch.global_batch_size={size}")
    yaml_file = experts_yaml if "expert" in name else run_yaml
    words = arguments(yaml_file, run, *options, f"{COMPARE}=1")
    complete(server, words, world_size=size, spoil=flips(how, 9))
    codes, other = server.live(arguments(yaml_file, undisturbed, *options), world_size=size)
    assert codes == [0] * size, other
    ours, theirs = final_tensors(run, LAST), final_tensors(undisturbed, LAST)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert losses(run) == losses(undisturbed)
    [event] = events(run, "replicas_differed")
    # A state is seen in what the next update makes of it; the step before was compared too.
    assert event["step"] == (10 if how == "state bit" else 9)
    assert event["to_step"] == 8
    assert event["ranks"] == named
    assert event["is_known"] is (named != PAIR)
    assert checkpoints.list_steps(run) == [8, 10, LAST]


def test_two_ranks_that_differ_are_both_named(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """`uninterrupted` compares nothing."""
    run = tmp_path / "run"
    words = arguments(run_yaml, run, f"{COMPARE}=1")
    text = complete(server, words, spoil=flips("parameter bit", 13))
    assert_same_run(run, uninterrupted)
    assert "step 14: the parameters of rank 0 on " in text
    assert "(one of them is wrong, and it is unknown which); continuing from step 12" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "code", "fix"),
    [
        (2, 2, "whose memory or processors may be faulty -> exclude it"),
        (3, EXIT_FAULTY_HOST, "memory or processors of this host may be faulty -> test it"),
    ],
)
def test_a_host_that_errs_again_is_to_be_excluded(
    server: Server,
    run_yaml: Path,
    tmp_path: Path,
    size: int,
    code: int,
    fix: str,
    request: pytest.FixtureRequest,
) -> None:
    """By its exit code, if it is known which of its ranks is wrong."""
    run = tmp_path / "run"
    batch = "batch.global_batch_size=3" if size == 3 else "batch.global_batch_size=4"
    words = arguments(run_yaml, run, f"{COMPARE}=1", batch)
    codes, text = server.live(words, world_size=size, spoil=flips("parameter bit", 9, 15))
    assert code in codes, text
    assert "Traceback" not in text
    assert fix in text
    if size == 2:  # as `uninterrupted`
        complete(server, words)
        assert_same_run(run, request.getfixturevalue("uninterrupted"))


@pytest.mark.slow
def test_without_a_checkpoint_from_before(server: Server, run_yaml: Path, tmp_path: Path) -> None:
    words = arguments(run_yaml, tmp_path / "run", f"{COMPARE}=1", f"train.steps={STEPS}")
    codes, text = server.live(words, spoil=flips("parameter bit", 1))
    assert 2 in codes, text
    assert "has no checkpoint up to step 0, when they were alike -> start the run again" in text
