"""What Triton lacks on a host is found before a run compiles anything."""

from __future__ import annotations

import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from bigtrain.system import machine
from bigtrain.system.machine import triton_problem


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of commands, on a host with Triton and Python's headers."""
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name, _scheme: str(headers))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    return folder


def make_command(path: Path) -> None:
    path.touch(mode=0o755)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_c_compiler_is_enough(commands: Path, name: str) -> None:
    assert triton_problem() == "Triton needs a C compiler, and there is neither gcc nor clang"
    make_command(commands / name)
    assert triton_problem() == ""


def test_the_variable_decides(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_command(commands / "gcc")
    monkeypatch.setenv("CC", "icx")
    assert triton_problem() == "Triton needs a C compiler, and CC = 'icx' is none"
    make_command(commands / "icx")
    assert triton_problem() == ""


def test_headers_are_needed(commands: Path, tmp_path: Path) -> None:
    make_command(commands / "gcc")
    (tmp_path / "include" / "Python.h").unlink()
    assert triton_problem().startswith("Triton needs Python's headers, and ")
    assert "include/Python.h is missing" in triton_problem()


def test_triton_itself_is_needed(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_command(commands / "gcc")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: None)
    assert triton_problem() == "Triton is not installed"
