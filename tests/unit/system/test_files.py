"""What may be written to, also while other processes make and remove it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bigtrain.errors import DataError
from bigtrain.system.files import require_free


def test_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("absent", "absent/below", "empty", "file/below"):
        require_free(tmp_path / name)


def test_what_is_not_free(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(DataError, match="not a directory"):
            require_free(tmp_path / name)
    with pytest.raises(DataError, match="not empty"):
        require_free(tmp_path)


def test_a_directory_made_while_it_is_looked_at_is_free(tmp_path: Path) -> None:
    """Two ranks start at once: one makes the folder between the other's looks."""
    path = tmp_path / "d"
    is_over = threading.Event()

    def make_and_remove() -> None:
        while not is_over.is_set():
            path.mkdir()
            path.rmdir()

    other = threading.Thread(target=make_and_remove)
    other.start()
    try:
        for _ in range(5_000):
            require_free(path)
    finally:
        is_over.set()
        other.join()
