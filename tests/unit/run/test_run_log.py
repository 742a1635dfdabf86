"""Lines of a run's log before the run directory is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.run.health.fencing import RunClaim
from bigtrain.run.run_log import RunLog


def test_a_line_that_is_said_again_before_the_log_is_open_is_shown_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The checkpoints are read twice where the newest is corrupt."""
    log = RunLog(RunClaim(tmp_path), is_main=True)
    for _ in range(2):
        log.info("skipping corrupt checkpoint at step 12")
        log.info("resumed at step 8")
    log.close()
    assert capsys.readouterr().err.splitlines() == [
        "skipping corrupt checkpoint at step 12",
        "resumed at step 8",
    ]
