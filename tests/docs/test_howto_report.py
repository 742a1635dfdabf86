"""What the page on reports tells people to type is typed here."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.cli import main
from tests.support.pages import page_text
from tests.support.run_directories import eventful_run, make_run, step_line
from tests.support.worlds import ROOT

PAGE = page_text("docs/howto/report.md")
COMMAND = Path(sys.executable).parent / "bigtrain"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, flags=re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_page_as_it_stands(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventful_run(tmp_path / "runs" / "one", num_steps=60)
    for name in ("two", "three"):
        make_run(tmp_path / "runs" / name, [step_line(1), step_line(2)])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    one, three, serve = commands()
    with monkeypatch.context() as patched:
        patched.chdir(tmp_path)
        for words in (one, three):
            assert words[0] == "bigtrain"
            assert main(words[1:]) == 0
    assert (tmp_path / "runs/one/report.html").is_file()
    assert "<h1>one, two, three</h1>" in (tmp_path / "three.html").read_text()
    # At a port of the test's own: somebody may look at a run here.
    process = subprocess.Popen(
        [COMMAND, *serve[1:], "--port", str(free_port)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"http://127.0.0.1:{free_port}/ until Ctrl-C\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("ended\n", None)
    assert process.returncode == 0
