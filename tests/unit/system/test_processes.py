"""How a process ends, and what the collector does while libraries are imported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

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


def test_launches_of_another_port_do_not_share_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for port in ("29500", "29501"):
        log = HostErrorLog({"MASTER_PORT": port})
        assert not log.is_any()
        assert log.is_first("bad")
