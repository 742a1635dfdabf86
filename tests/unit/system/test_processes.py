"""How a process ends, and what the collector does while libraries are imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigtrain.system.processes import HostErrorLog
from tests.support.worlds import ROOT

PROGRAM = """
import atexit, sys, threading
from bigtrain.system.processes import exit_process

class Unloaded:
    def __del__(self):
        print("unloaded")

kept = Unloaded()
may_end = threading.Event()
threading.Thread(target=lambda: (may_end.wait(), print("thread"))).start()
atexit.register(print, "atexit", end="")
sys.stderr.write("to stderr")
threading.Timer(0.1, may_end.set).start()
exit_process(75)
"""


def test_leaving_waits_and_flushes_but_unloads_nothing() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (75, "to stderr")
    assert result.stdout == "thread\natexit"


def test_leaving_with_a_closed_stream() -> None:
    program = (
        "import sys; from bigtrain.system.processes import exit_process; "
        "sys.stdout.close(); exit_process(2)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 2


def test_the_collector_is_as_it_was() -> None:
    program = (
        "import gc; from bigtrain.system.processes import importing\n"
        "with importing():\n    assert not gc.isenabled()\n"
        "assert gc.isenabled() and gc.get_freeze_count()\n"
        "gc.disable()\n"
        "with importing():\n    pass\n"
        "assert not gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.slow
def test_transformers_does_not_import_torchao() -> None:
    code = (
        "import bigtrain.models, sys\n"
        "from transformers import PreTrainedModel\n"
        "from transformers.quantizers import quantizer_torchao\n"
        "assert 'torchao' not in sys.modules\n"
        "import torchao\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_each_launch_prints_an_error_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever rank fails first, also after earlier launches by the same parent process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for ranks in ([0, 1], [1, 0], [0], [1, 0], [2, 0, 1]):
        logs = [HostErrorLog({"MASTER_PORT": "1", "RANK": str(rank)}) for rank in ranks]
        for text in ("a shard is missing", "no space"):
            printed = [log.is_first(text) for log in logs]
            assert sum(printed) == 1, (ranks, text, printed)
        assert all(log.is_any() for log in logs)


class _Interrupted:
    """A method of `Path` after `num_calls` of which, by any of these methods, a function runs."""

    def __init__(self, num_calls: int, function: Callable[[], None]) -> None:
        self.calls_left, self._function = num_calls, function

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            self.calls_left -= 1
            if self.calls_left == 0:
                self._function()
            return result

        return wrapped


@pytest.mark.parametrize("num_earlier", [0, 1, 2])
@pytest.mark.parametrize("num_calls", range(1, 10))
def test_one_of_two_ranks_reports_however_they_interleave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_calls: int, num_earlier: int
) -> None:
    """Rank 1 reports the error of rank 0 after each of rank 0's looks at files, also where
    launches by the same parent had it before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    logs = [HostErrorLog({"MASTER_PORT": "1", "RANK": str(rank)}) for rank in (0, 1)]
    for _ in range(num_earlier):
        for log in logs:
            log.is_first("no space")
        for note in tmp_path.glob("*/*"):
            os.utime(note, (0, 0))
    printed: list[bool] = []
    interruption = _Interrupted(num_calls, lambda: printed.append(logs[1].is_first("no space")))
    for name in ("exists", "stat", "touch", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, interruption.wrap(getattr(Path, name)))
    printed.append(logs[0].is_first("no space"))
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if interruption.calls_left > 0:
        printed.append(logs[1].is_first("no space"))
    assert sum(printed) == 1


def test_launches_of_another_port_do_not_share_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for port in ("29500", "29501"):
        log = HostErrorLog({"MASTER_PORT": port})
        assert not log.is_any()
        assert log.is_first("bad")
