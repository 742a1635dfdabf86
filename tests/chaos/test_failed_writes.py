"""Saves that fail: reported, survived up to `checkpoint.max_failures`, older ones unharmed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigtrain.run import checkpoints
from tests.chaos.conftest import Server, arguments, assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def size_of_a_save(uninterrupted: Path) -> int:
    """Bytes of the largest file, which rank 0 or 1 writes."""
    manifest = checkpoints.find(uninterrupted, None) / "manifest.json"
    return max(entry["bytes"] for entry in json.loads(manifest.read_text())["files"].values())


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_full_disk_is_survived_until_it_is_too_much(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path, asynchronous: str
) -> None:
    """From some step on, one process cannot write its file (RLIMIT_FSIZE: EFBIG)."""
    run = tmp_path / "run"
    words = arguments(run_yaml, run, f"checkpoint.asynchronous={asynchronous}")
    limit = {"rank": 1, "after_saves": 4, "bytes": size_of_a_save(uninterrupted) // 2}
    codes, text = server.live(words, full_disk=limit)
    assert 2 in codes, text
    assert "Traceback" not in text
    for number, step in ((1, 10), (2, 12), (3, 14)):
        assert f"checkpoint of step {step} could not be written: [Errno 27] File too large" in text
        assert f"(failure {number} of checkpoint.max_failures = 3)" in text
    assert "3 checkpoints in a row could not be written, the last one of step 14" in text
    assert checkpoints.steps(run) == [6, 8]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "step-00000006",
        "step-00000008",
    }
    codes, text = server.live(words)
    assert codes == [0, 0], text
    assert "resumed at step 8 " in text
    assert_same_run(run, uninterrupted)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose checkpoints lie on a disk of 32 MiB."""
    run = tmp_path / "run"
    disk = run / "checkpoints"
    disk.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a disk")
    yield run
    subprocess.run(["umount", disk], check=True)


def test_a_save_that_would_fill_the_disk_is_not_begun(
    server: Server, run_yaml: Path, uninterrupted: Path, small_disk: Path
) -> None:
    words = arguments(run_yaml, small_disk, "checkpoint.max_failures=2")
    codes, text = server.live(words)
    assert 2 in codes, text
    assert "Traceback" not in text
    assert "no space left for it: " in text
    assert "has 32.0 MiB free, and 0.1 MiB are needed, besides 64 to spare" in text
    disk = small_disk / "checkpoints"
    assert list(disk.iterdir()) == []
    subprocess.run(["mount", "-o", "remount,size=256m", disk], check=True)
    codes, text = server.live(words)
    assert codes == [0, 0], text
    assert_same_run(small_disk, uninterrupted)


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
    codes, text = server.live(arguments(run_yaml, run), full_disk=limit)
    assert codes == [0, 0], text
    assert text.count("could not be written") == 1
    assert checkpoints.steps(run) == [8, 16, 22, 24]
    assert_same_run(run, uninterrupted)
