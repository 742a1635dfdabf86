"""What asks for a run to be started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigtrain.system.stop_signals import REQUEUE, ask_for_restart


def test_a_marker_says_which_start_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    ask_for_restart(tmp_path, "SIGTERM", 12)
    assert json.loads((tmp_path / REQUEUE).read_text()) == {"signal": "SIGTERM", "step": 12}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    for restarts, start in ((None, "7-0"), ("2", "7-2")):
        if restarts is not None:
            monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        ask_for_restart(tmp_path, "watchdog", 3)
        # As slurm/train.sbatch looks for it.
        assert f'"start": "{start}"' in (tmp_path / REQUEUE).read_text()
