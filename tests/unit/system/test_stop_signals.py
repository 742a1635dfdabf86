"""What asks for a run to be started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from bigtrain.system.stop_signals import REQUEUE, StopSignals, ask_for_restart


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


def test_in_an_interpreter_ctrl_c_raises_where_there_is_nothing_to_save() -> None:
    """And is recorded where there is; the handlers are as before afterwards."""
    before = signal.getsignal(signal.SIGINT)
    seen: list[signal.Signals] = []
    with StopSignals(interrupts=True) as heard:
        heard.exit_after(seen.append)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before
    with StopSignals(interrupts=True) as heard:
        heard.listen()
        signal.raise_signal(signal.SIGINT)
        assert heard.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):  # it was recorded before
            heard.exit_after(seen.append)
    assert seen == [signal.SIGINT] * 2
    assert signal.getsignal(signal.SIGINT) is before
