"""Keep lines that are typed as they stand apart from those of tests beside them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from bigtrain.cli import main
from tests.support.worlds import free_port


@pytest.fixture(autouse=True)
def own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give torchrun a free port instead of its default one."""
    monkeypatch.setenv("PET_MASTER_PORT", str(free_port()))


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """``typed(line)``: what a line of `bigtrain` prints that is typed in an empty directory; it
    must end well."""

    def run(line: str) -> str:
        command, *words = shlex.split(line)
        assert command == "bigtrain"
        monkeypatch.chdir(tmp_path)
        assert main(words) == 0
        return capsys.readouterr().out

    return run
