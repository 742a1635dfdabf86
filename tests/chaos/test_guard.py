"""Steps that go bad on one rank: skipped on all of them, or rolled back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import (
    STEPS,
    arguments,
    assert_same_run,
    complete,
    events,
    final_tensors,
    losses,
    refused,
)
from tests.support.lives import Server
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SAMPLES_PER_STEP = 4

ENGINES = {
    "zero0": ["zero0"],
    "zero3": ["zero3"],
    "bf16 zero1": ["zero1", "precision.dtype=bfloat16"],
    "bf16 unchecked": ["UNCHECKED", "precision.dtype=bfloat16"],
    "tensor": ["zero1", "parallel.tensor=2"],
    "bf16 pipeline": ["pipeline_zero1", "parallel.pipeline=2", "precision.dtype=bfloat16"],
    "bf16 averages": ["zero0", "optimizer.ema.decay=0.9", "precision.dtype=bfloat16"],
}


def spoil(steps: dict[int, str]) -> dict[str, Any]:
    return {"rank": 1, "steps": {str(step): how for step, how in steps.items()}}


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "bf16 zero1")) for n in ENGINES]
)
def test_a_bad_step_changes_nothing_on_any_process(
    server: Server, run_yaml: Path, tmp_path: Path, name: str
) -> None:
    """A loss that is not a number and a spike of the gradient, both on one process alone."""
    run, unchecked = tmp_path / "run", tmp_path / "unchecked.json"
    tree = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    tree["bf16"] |= {"check_grad_overflow": False}
    unchecked.write_text(json.dumps(tree))
    engine = [str(unchecked) if word == "UNCHECKED" else word for word in ENGINES[name]]
    options = [
        "train.steps=8",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=8",
        "guard.spike_sigma=1000",
        "guard.window=3",
    ]
    words = arguments(run_yaml, run, "--deepspeed_config", *engine, *options)
    complete(server, words, spoil=spoil({1: "nan", 4: "nan", 7: "gradient"}))
    states = {step: checkpoints.read_state(checkpoints.find(run, step)) for step in range(1, 9)}
    tensors = {step: final_tensors(run, step) for step in range(1, 9)}
    assert any(key.startswith("ema/") for key in tensors[8]) == ("averages" in name)
    for bad in (4, 7):
        assert equal(tensors[bad], tensors[bad - 1])
        assert states[bad]["samples"] == bad * SAMPLES_PER_STEP
    assert not equal(tensors[2], tensors[1])
    assert not equal(tensors[5], tensors[4])
    assert not equal(tensors[8], tensors[7])
    assert all(tensor.isfinite().all() for tensor in tensors[8].values())
    counts = {step: state["engine"]["optimizer_steps"] for step, state in states.items()}
    assert counts == {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 6: 4, 7: 4, 8: 5}
    at_once, first, second = events(run, "skipped")
    assert at_once["step"] == 1
    assert first["step"] == 4
    assert first["first_sample"] == 12
    assert first["num_samples"] == SAMPLES_PER_STEP
    assert first["reason"] == "loss is not finite"
    assert first["loss"] is None
    assert second["step"] == 7
    assert second["reason"].startswith("gradient norm ")
    assert second["reason"].endswith("of the last 3 steps")
    assert second["loss"] is not None
    assert states[8]["guard"]["num_skipped"] == 3
    assert (
        "step 4: update skipped, loss is not finite (samples 12 to 15; 1 in a row, 2 in total)"
        in (run / "log.txt").read_text()
    )


@pytest.mark.slow
def test_the_guard_changes_no_run_without_bad_steps(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """`uninterrupted` has the guard of the defaults."""
    run = tmp_path / "run"
    complete(server, arguments(run_yaml, run, "guard.enabled=false"))
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_bad_steps_that_do_not_end_are_gone_back_from(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # Of step 8 there is a checkpoint, which `keep_last` alone would have removed by step 11.
    keep = ["checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_every_steps=12"]
    words = arguments(run_yaml, run, "guard.max_consecutive=3", *keep)
    text = complete(server, words, spoil=spoil({9: "nan", 10: "nan", 11: "nan"}))
    [back] = events(run, "rolled_back")
    expected = {"first_sample": 32, "num_samples": 12, "to_step": 8}
    assert {key: back[key] for key in expected} == expected
    assert [event["step"] for event in events(run, "skipped")] == [9, 10, 11]
    assert "step 11: 3 bad steps in a row; rolled back to step 8, samples 32 to 43 skipped" in text
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    state = checkpoints.read_state(checkpoints.find(run, STEPS))
    assert state["samples"] == (STEPS + 3) * SAMPLES_PER_STEP
    assert state["guard"]["rolled_back_to"] == 8
    # What stands in a checkpoint is all that the rest of the run follows from.
    again = tmp_path / "again"
    shutil.copytree(run, again)
    checkpoints.remove(checkpoints.checkpoint_path(again, STEPS))
    text = complete(server, arguments(run_yaml, again, *words[3:]))
    assert "resumed at step 12 " in text
    assert_same_run(again, run)
    assert checkpoints.list_steps(again) == [12, STEPS]
    assert events(again, "skipped") == events(run, "skipped")


DAMAGE = """
import shutil

class Damage:
    def step(self, view):
        if view.step != 10: return
        newest = view.directory / "checkpoints/step-00000008"
        if "{how}" == "remove":
            shutil.rmtree(newest)
        else:
            file = newest / "tensors/rank-0000{rank}.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
"""


@pytest.mark.slow
def test_nothing_of_a_corrupt_checkpoint_is_left_after_a_rollback(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    """As if the corrupt checkpoint had never been there; the engine has parts of it before it
    reads the older one."""
    runs = []
    for how, rank in (("remove", 0), ("flip", 1)):
        folder = tmp_path / how
        folder.mkdir()
        (folder / "damage.py").write_text(DAMAGE.replace("{how}", how).replace("{rank}", str(rank)))
        words = arguments(run_yaml, folder / "run", "guard.max_consecutive=3", "train.steps=12")
        words += ["checkpoint.every_steps=4", "checkpoint.keep_last=9"]
        words += ["checkpoint.asynchronous=false", "optimizer.ema.decay=0.9"]
        words.append('callbacks=[{"type": "damage:Damage"}]')
        script = [str(ROOT / "tests/launch/extension_worker.py"), str(folder), *words]
        bad = spoil({9: "nan", 10: "nan", 11: "nan"})
        text = complete(server, [], script=script, spoil=bad)
        assert "rolled back to step 4" in text
        assert ("skipping corrupt checkpoint at step 8" in text) == (how == "flip")
        runs.append(folder / "run")
    ours, theirs = (final_tensors(run, 12) for run in runs)
    assert ours.keys() == theirs.keys()
    assert equal(ours, theirs)
    assert losses(runs[0]) == losses(runs[1])


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (range(1, 4), "has no checkpoint from before them to roll back to -> check the data"),
        pytest.param(
            range(5, 100),
            "steps were bad again after the run rolled back to step 4 3 times",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_nothing_helps_ends(
    server: Server, run_yaml: Path, tmp_path: Path, steps: range, said: str
) -> None:
    words = arguments(run_yaml, tmp_path / "run", "guard.max_consecutive=3")
    text = refused(server, words, spoil=spoil(dict.fromkeys(steps, "nan")))
    assert said in text
