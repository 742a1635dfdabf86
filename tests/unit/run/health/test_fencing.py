"""Generations of a run directory: one holder, told by name, whatever order things happen in."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from bigtrain.errors import EXIT_STALE_LAUNCH, RunRemovedError, StaleLaunchError
from bigtrain.run.health import fencing


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / fencing.DIRECTORY))


def test_a_later_launch_makes_the_earlier_stale(tmp_path: Path) -> None:
    first = fencing.acquire(tmp_path, {"SLURM_JOB_ID": "12"})
    first.check()
    second = fencing.acquire(tmp_path, {"SLURM_JOB_ID": "34"})
    assert names(tmp_path) == ["00000001.superseded.json", "00000002.json"]
    assert first.holder.attempt != second.holder.attempt
    second.check()
    assert not second.lost()
    assert first.lost()
    with pytest.raises(StaleLaunchError) as caught:
        first.check()
    assert caught.value.exit_code == EXIT_STALE_LAUNCH
    said = f"{tmp_path} is held by generation 2 (host {os.uname().nodename}, process {os.getpid()}"
    assert str(caught.value).startswith(f"{said}, Slurm job 34, since 20")
    assert "this is generation 1" in str(caught.value)


def test_of_many_starts_at_once_one_holds(tmp_path: Path) -> None:
    holds: list[fencing.RunToken] = []
    threads = [
        threading.Thread(target=lambda: holds.append(fencing.acquire(tmp_path, {})))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    generations = sorted(hold.holder.generation for hold in holds)
    assert len(set(generations)) == 16
    assert [hold.holder.generation for hold in holds if not hold.lost()] == [generations[-1]]


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    first, second = fencing.acquire(tmp_path, {}), fencing.acquire(tmp_path, {})
    assert first.lost()
    assert not second.lost()


def test_a_listing_that_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an NFS client's: the names it has seen, while opening a file asks the server."""
    first = fencing.acquire(tmp_path, {})
    old = names(tmp_path)
    second = fencing.acquire(tmp_path, {})
    monkeypatch.setattr(fencing.os, "listdir", lambda _: old)
    with pytest.raises(StaleLaunchError, match=r"held by generation 2 \(host"):
        first.check()
    second.check()


def test_records_removed_by_hand_end_nobody(tmp_path: Path) -> None:
    hold = fencing.acquire(tmp_path, {})
    (tmp_path / fencing.DIRECTORY / "00000001.json").unlink()
    hold.check()


def test_a_run_directory_that_was_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    hold = fencing.acquire(run, {})
    (run / "config.json").write_text("{}")
    shutil.rmtree(run / fencing.DIRECTORY)
    hold.check()  # the records alone: as above
    shutil.rmtree(run)
    (run / "checkpoints").mkdir(parents=True)  # as a save under way makes it anew
    assert hold.lost()
    with pytest.raises(RunRemovedError, match="was removed while the run wrote to it"):
        hold.check()


def test_an_elastic_launcher_does_not_take_it_back(tmp_path: Path) -> None:
    cut_off = {"TORCHELASTIC_RUN_ID": "12-0", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = cut_off | {"TORCHELASTIC_RESTART_COUNT": "1"}
    fencing.acquire(tmp_path, cut_off)
    fencing.acquire(tmp_path, again)  # its own
    fencing.acquire(tmp_path, {"TORCHELASTIC_RUN_ID": "12-1"})
    before = names(tmp_path)
    with pytest.raises(StaleLaunchError, match=r"from this launch \(12-0::\); it is not restarted"):
        fencing.acquire(tmp_path, again)
    assert names(tmp_path) == before
    # A person who starts the same command again means it.
    assert fencing.acquire(tmp_path, cut_off).holder.generation == 4


def test_what_a_record_says(tmp_path: Path) -> None:
    hold = fencing.acquire(tmp_path, {})
    record = json.loads((tmp_path / fencing.DIRECTORY / "00000001.json").read_text())
    assert list(record) == [
        "generation",
        "attempt",
        "host",
        "pid",
        "slurm_job_id",
        "launch",
        "since",
    ]
    assert record["attempt"] == hold.holder.attempt
