"""What a session shows before the run directory is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bigtrain.run.session import Session
from bigtrain.system.world import World


def test_a_line_that_is_said_again_before_the_log_is_open_is_shown_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The checkpoints are read twice where the newest is corrupt."""
    none = cast("Any", None)
    device = torch.device("cpu")
    session = Session(none, World(0, 1, 0), device, tmp_path, none, none, ("host",), none)
    for _ in range(2):
        session.log("skipping corrupt checkpoint at step 12")
        session.log("resumed at step 8")
    session.close()
    assert capsys.readouterr().err.splitlines() == [
        "skipping corrupt checkpoint at step 12",
        "resumed at step 8",
    ]
