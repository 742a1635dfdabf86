"""Saves that fail: reported, survived up to `checkpoint.max_failures`, older ones unharmed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import (
    STEPS,
    arguments,
    assert_same_run,
    complete,
    final_tensors,
    losses,
    refused,
)
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def size_of_a_save(uninterrupted: Path) -> int:
    """Bytes of the largest file, which rank 0 or 1 writes."""
    manifest = checkpoints.find(uninterrupted, None) / "manifest.json"
    return max(entry["bytes"] for entry in json.loads(manifest.read_text())["files"].values())


@pytest.mark.slow
def test_full_disk_is_survived_until_it_is_too_much(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """From some step on, one process cannot write its file (RLIMIT_FSIZE: EFBIG)."""
    run = tmp_path / "run"
    words = arguments(run_yaml, run)
    limit = {"rank": 1, "after_saves": 4, "bytes": size_of_a_save(uninterrupted) // 2}
    text = refused(server, words, full_disk=limit)
    for number, step in ((1, 10), (2, 12), (3, 14)):
        assert f"checkpoint of step {step} could not be written: [Errno 27] File too large" in text
        assert f"(failure {number} of checkpoint.max_failures = 3)" in text
    assert "3 checkpoints in a row could not be written, the last one of step 14" in text
    assert checkpoints.list_steps(run) == [6, 8]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "step-00000006",
        "step-00000008",
    }
    text = complete(server, words)
    assert "resumed at step 8 " in text
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_never_saved(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """One element on one process, after step 11; without the guard, which would go back."""
    run = tmp_path / "run"
    words = arguments(run_yaml, run, "checkpoint.asynchronous=false", "guard.enabled=false")
    text = refused(server, words, spoil={"rank": 1, "steps": {"11": "master"}})
    reason = "the weights are not finite: master of "
    for number, step in ((1, 12), (2, 14), (3, 16)):
        assert f"checkpoint of step {step} could not be written: {reason}" in text
        assert f"(failure {number} of checkpoint.max_failures = 3)" in text
    assert checkpoints.list_steps(run) == [8, 10]
    assert all(tensor.isfinite().all() for tensor in final_tensors(run, 10).values())
    text = complete(server, words)
    assert "resumed at step 10 " in text
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_a_last_checkpoint_that_is_not_finite_ends_the_run_with_an_error(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    codes, text = server.live(
        arguments(run_yaml, run, "train.steps=4"), spoil={"rank": 0, "steps": {"4": "master"}}
    )
    assert 2 in codes, text
    assert "1 checkpoint in a row could not be written, the last one of step 4" in text
    assert checkpoints.list_steps(run) == [2]


@contextmanager
def disk(place: Path, size: str) -> Iterator[Path]:
    """A disk of its own, which only root may mount."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_disk_too_small_for_a_checkpoint_is_known_before_the_first_step(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with disk(run / "checkpoints", "32m") as place:
        text = refused(server, arguments(run_yaml, run))
        assert "the run could not save a checkpoint: no space left for it: " in text
        assert "has 32.0 MiB free, and 0.1 MiB are needed, plus 64 in reserve" in text
        assert list(run.iterdir()) == [place]
        assert list(place.iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_fills_later_ends_the_run_with_one_text(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """Figures and log cannot be written any more; checkpoints, on another disk, can."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with disk(run, "1m"):
        (run / "checkpoints").symlink_to(elsewhere)
        full = {"number": 2, "do": "fill", "directory": str(run)}
        text = refused(server, arguments(run_yaml, run), at_save=full)
        assert text.count("No space left on device") == 1
        assert ": cannot be written: [Errno 28] No space left on device -> make room" in text
        saved = checkpoints.list_steps(run)[-1]
        # A look for it twice a second: on a quick machine all steps are made by then.
        assert 4 <= saved <= STEPS
        (run / "filler").unlink()
        text = complete(server, arguments(run_yaml, run))
        assert saved == STEPS or f"resumed at step {saved} " in text
        ours, theirs = final_tensors(run), final_tensors(uninterrupted)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        if saved == STEPS:
            return  # complete, so that nothing is written: the line that was cut off stays
        # What there was no room for before the last save is not trained again.
        assert losses(run).items() <= losses(uninterrupted).items()
        assert losses(run).keys() >= {*range(1, 4), *range(saved + 1, STEPS + 1)}


def test_a_run_directory_that_is_removed_is_noticed_at_once(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    gone = {"number": 2, "do": "remove", "directory": str(run)}
    # So many that it could not end by itself before the test's limit.
    text = refused(server, arguments(run_yaml, run, "train.steps=100000"), at_save=gone)
    assert f"train.py: {run} was removed while the run wrote to it, with its checkpoints" in text
    assert not (run / "generations").exists()


def test_an_output_directory_that_cannot_be_made(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    """Its permissions allow root to write to /proc: only trying shows it."""
    text = refused(server, arguments(run_yaml, Path("/proc/bigtrain/run")))
    assert "output.directory = '/proc/bigtrain/run': /proc takes no files" in text
    assert "-> choose another one" in text


@pytest.mark.slow
def test_a_failed_save_in_between_costs_that_save_alone(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    limit = {
        "rank": 0,
        "after_saves": 4,
        "until_saves": 5,
        "bytes": size_of_a_save(uninterrupted) // 2,
    }
    text = complete(server, arguments(run_yaml, run), full_disk=limit)
    assert text.count("could not be written") == 1
    assert checkpoints.list_steps(run) == [8, 16, 22, 24]
    assert_same_run(run, uninterrupted)
