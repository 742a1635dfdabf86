"""Two starts of one run at the same time: the later one is not disturbed, the earlier one ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigtrain.errors import EXIT_STALE_LAUNCH
from bigtrain.run.health import fencing
from tests.chaos.conftest import arguments, assert_same_run
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def contents(run: Path) -> dict[str, tuple[int, bytes]]:
    """What is in the run directory, by path; with it the file's identity."""
    return {
        path.relative_to(run).as_posix(): (path.stat().st_ino, path.read_bytes())
        for path in run.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("during", [False, True])
def test_the_earlier_start_ends_and_changes_nothing(
    server: Server, run_yaml: Path, uninterrupted: Path, tmp_path: Path, during: bool
) -> None:
    """It is stopped somewhere, as behind a cut link, and comes back after or during the later."""
    run = tmp_path / "run"
    before: dict[str, tuple[int, bytes]] = {}
    newer, newer_text, older, older_text = server.overtake(
        arguments(run_yaml, run),
        during=during,
        before_it_goes_on=lambda: before.update(contents(run)),
    )
    assert newer == [0, 0], newer_text
    assert older[0] == EXIT_STALE_LAUNCH, older_text
    assert "Traceback" not in older_text
    held_by = f"{run} is held by generation 2 (host {os.uname().nodename}, process "
    assert f"train.py: {held_by}" in older_text
    assert "this is generation 1, a stale launch, which stops writing" in older_text
    assert "held by" not in newer_text
    assert_same_run(run, uninterrupted)
    assert during or contents(run) == before
    holder = fencing.newest_holder(run)
    assert holder is not None
    assert holder.generation == 2
