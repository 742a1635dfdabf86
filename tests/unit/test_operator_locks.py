"""Locks of torch's compiler: waited for while somebody may hold them, refused when nobody can."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

from bigtrain.engine import operator_locks
from bigtrain.engine.operator_locks import operators_folder, wait_for_operator_locks
from bigtrain.errors import LaunchError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of one operator, as torch makes it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "operators"))
    monkeypatch.setattr(operator_locks, "_LOOK_EVERY_SECONDS", 0.01)
    return Path(_get_build_directory("cpu_adam", False))


def take(folder: Path) -> FileBaton:
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    return baton


def abandon(folder: Path, seconds: float) -> None:
    """A lock whose maker is gone, with no change in the folder since."""
    os.close(take(folder).fd)
    (folder / "build.ninja").touch()
    for path in folder.iterdir():
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("name", [None, "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"])
def test_the_folder_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    for variable in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if name:
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    assert operators_folder() / "cpu_adam" == Path(_get_build_directory("cpu_adam", False))


def test_nothing_to_wait_for(folder: Path) -> None:
    wait_for_operator_locks()
    (folder / "build.ninja").touch()
    wait_for_operator_locks()
    shutil.rmtree(folder.parent)
    wait_for_operator_locks()


def test_a_lock_that_nobody_holds_is_named(folder: Path) -> None:
    abandon(folder, 3600)
    with pytest.raises(LaunchError, match=r"for 60 minutes.* -> rm ") as error:
        wait_for_operator_locks()
    assert str(error.value).endswith(f" -> rm {folder / 'lock'}")
    assert (folder / "lock").exists()


@pytest.mark.parametrize("how", ["held", "recent", "compiling"])
def test_a_lock_that_somebody_may_hold_is_waited_for(folder: Path, how: str) -> None:
    """Held, however old; just made, perhaps on another host; old, but its compiler still writes."""
    if how == "held":
        baton = take(folder)
        os.utime(folder / "lock", (0, 0))
    else:
        abandon(folder, 60 if how == "recent" else 3600)
    if how == "compiling":
        (folder / "adam.o").touch()
    waiting = threading.Thread(target=wait_for_operator_locks)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    if how == "held":
        baton.release()
    else:
        (folder / "lock").unlink()
    waiting.join(10)
    assert not waiting.is_alive()
