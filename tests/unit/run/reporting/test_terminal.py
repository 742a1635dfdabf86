"""What a person sees at a real terminal while a run trains, and what a file gets."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pexpect
import pytest

from bigtrain.engine.startup.printed_lines import prints_logged
from bigtrain.run.reporting.library_log import import_log, library_log
from tests.support.worlds import ROOT

RUN = """
import sys
from pathlib import Path
from bigtrain.run.reporting.metrics import MetricsWriter
from tests.unit.run.reporting.test_metrics import step_metrics

with MetricsWriter(Path(sys.argv[1]), total_steps=400, trackers=(), project="x",
                   run_config={}) as metrics:
    metrics.note("DeepSpeed: only for the log")
    metrics._progress._bar.mininterval = 0  # else it is drawn ten times a second at most
    for step in (1, 2, 3):
        metrics.advance(step)
    metrics.log_step(step_metrics(100))
    metrics.info("checkpoint of step 100")
    metrics.advance(150)
"""


def test_a_bar_moves_between_logged_steps(tmp_path: Path) -> None:
    with pexpect.spawn(
        sys.executable, ["-c", RUN, str(tmp_path)], cwd=str(ROOT), encoding="utf-8",
        timeout=60, dimensions=(24, 160),
    ) as terminal:  # fmt: skip
        terminal.expect(pexpect.EOF)
        shown = str(terminal.before)
    assert terminal.exitstatus == 0, shown
    drawn = re.findall(r"(\d+)/400, (?:loss .*? )?left (\S+?)[\s\x1b\r]", shown)
    steps = [int(step) for step, _ in drawn]
    assert {1, 2, 3, 100} <= set(steps), shown
    assert steps[-1] == 150
    assert dict(drawn)["100"] == "2m30s"
    assert dict(drawn)["150"] == "2m05s"
    assert "\r" in shown
    assert "checkpoint of step 100" in shown
    assert "only for the log" not in shown
    assert "DeepSpeed: only for the log" in (tmp_path / "log.txt").read_text()
    # Not a line for each step in the log: those that are logged.
    assert (tmp_path / "log.txt").read_text().count("/400 loss ") == 1


@pytest.mark.parametrize("shown", [True, False])
def test_deepspeeds_log_goes_into_the_file_and_is_shown_on_request(
    capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    logger = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    kept, level, propagates = list(logger.handlers), logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.WARNING)
    lines: list[str] = []
    try:
        with import_log(is_shown=shown) as said:
            logger.warning("no accelerator")
        with library_log(lines.append, is_shown=shown):
            logger.info("step=0\nlr=1")
            logger.warning("careful")
            logger.error("broken")
        assert logger.handlers == [handler]
        assert (logger.level, handler.level) == (logging.WARNING, logging.NOTSET)
        logger.warning("after")
    finally:
        logger.handlers[:], logger.propagate = kept, propagates
        logger.setLevel(level)
    assert said == ["DeepSpeed warning: no accelerator"]
    assert lines == [
        "DeepSpeed: step=0\nDeepSpeed: lr=1",
        "DeepSpeed warning: careful",
        "DeepSpeed error: broken",
    ]
    out = capsys.readouterr().out.split("\n")
    everything = ["no accelerator", "step=0", "lr=1", "careful", "broken", "after", ""]
    assert out == (everything if shown else ["broken", "after", ""])


@pytest.mark.parametrize("shown", [True, False])
def test_logs_and_warnings_of_other_libraries_go_into_the_file(
    capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    """Of a library with a handler of its own, and of one without; the user's are shown."""
    with_handler, without = logging.getLogger("transformers"), logging.getLogger("torchao.ops")
    before = (list(with_handler.handlers), with_handler.propagate)
    handler = logging.StreamHandler(sys.stderr)
    with_handler.handlers[:], with_handler.propagate = [handler], False
    installed = f"{sys.prefix}/lib/site-packages/peft/x.py"
    lines: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = shown_warning
            with library_log(lines.append, is_shown=shown):
                logging.getLogger("transformers.models").warning("slow path")
                without.warning("no kernel")
                without.error("broken kernel")
                logging.getLogger("mine").warning("mine")
                warnings.warn_explicit("old", FutureWarning, installed, 7)
                warnings.warn_explicit("old", FutureWarning, "/home/me/x.py", 7)
        assert with_handler.handlers == [handler]
        assert logging.getLogger("torchao").handlers == []
        assert logging.getLogger("torchao").propagate
    finally:
        with_handler.handlers[:], with_handler.propagate = before
    expected = [
        "transformers warning: slow path",
        "torchao warning: no kernel",
        "torchao error: broken kernel",
    ]
    if not shown:
        expected.append(f"FutureWarning: old ({installed}:7)")
    assert lines == expected
    err = capsys.readouterr().err
    assert ("slow path" in err) == shown
    assert "no kernel" not in err
    assert ("broken kernel" in err) != shown  # pytest's own handler has what is propagated
    assert "warning of /home/me/x.py" in err
    assert (f"warning of {installed}" in err) == shown


def shown_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object
) -> None:
    print(f"warning of {filename}", file=sys.stderr)


def test_prints_of_an_engine_go_to_deepspeeds_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Also before an error."""
    logger, lines = logging.getLogger("DeepSpeed"), list[str]()
    with library_log(lines.append, is_shown=False):
        with prints_logged():
            print("MA 0.5 GB \n\nCPU Virtual Memory")
        with pytest.raises(ZeroDivisionError), prints_logged():
            _prints_and_fails()
    assert logger.level != logging.INFO
    assert lines == ["DeepSpeed: MA 0.5 GB", "DeepSpeed: CPU Virtual Memory", "DeepSpeed: begin"]
    assert capsys.readouterr().out == ""


def _prints_and_fails() -> None:
    print("begin")
    raise ZeroDivisionError


@pytest.mark.parametrize("setup", ["", "logging.basicConfig(format='%(message)s')\n"])
def test_a_warning_without_a_handler_is_not_printed(setup: str) -> None:
    """Neither by Python itself nor by a program's handler; an error is."""
    code = (
        f"import logging\n{setup}"
        "from bigtrain.run.reporting.library_log import library_log\n"
        "lines = []\n"
        "with library_log(lines.append, is_shown=False):\n"
        "    logging.getLogger('torchao.ops').warning('no kernel')\n"
        "    logging.getLogger('torchao.ops').error('broken')\n"
        "logging.getLogger('torchao.ops').warning('after')\n"
        "print(lines)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['torchao warning: no kernel', 'torchao error: broken']\n"
    assert done.stderr.splitlines() == ["broken", "after"]
