"""Copies of a run at an address never hold it up, and never end it."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import fsspec
import pytest

from bigtrain.run.reporting import run_copies
from bigtrain.run.reporting.run_copies import RunCopies
from bigtrain.system.storage.stores import StorageError


def checkpoint(run: Path, step: int) -> Path:
    path = run / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    (path / "state.json").write_text(str(step))
    (path / "manifest.json").write_text("{}")
    return path


def test_a_run_is_copied(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "run_id").write_text("x")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    copies = RunCopies(tmp_path, "memory://runs/a")
    copies.add(checkpoint(tmp_path, 4))
    (note,) = copies.wait(60)
    assert note.startswith("checkpoints/step-00000004 copied to memory://runs/a/checkpoints/step-")
    names = {name.removeprefix("/runs/a/") for name in fsspec.filesystem("memory").find("/runs/a")}
    own = {f"checkpoints/step-00000004/{name}" for name in ("state.json", "manifest.json")}
    assert names - {"checkpoints/step-00000004/copying.json"} == own | {
        "config.json",
        "run_id",
        "tokenizer/tokenizer.json",
    }
    # The next launch looks again, and has nothing to say.
    copies.add(tmp_path / "checkpoints/step-00000004")
    assert copies.wait(60) == []


def test_the_newest_is_copied_and_nothing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, began = Event(), Event()
    copied: list[str] = []

    def slowly(path: Path, place: str, last: str | None) -> int:
        began.set()
        free.wait(60)
        copied.append(path.name)
        return 0

    monkeypatch.setattr(run_copies, "copy_tree", slowly)
    copies = RunCopies(tmp_path, "memory://runs/b")
    copies.add(checkpoint(tmp_path, 1))
    assert began.wait(60)
    for step in (2, 3):
        copies.add(checkpoint(tmp_path, step))
    (note,) = copies.notes()
    assert note.startswith("step-00000002 was not copied to memory://runs/b: copying takes longer")
    (note,) = copies.wait(0.01)
    assert note.startswith("not everything was copied to memory://runs/b within 0.01 s")
    free.set()
    assert copies.wait(60) == []
    assert copied == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            StorageError("s3://b/x cannot be written after 8 attempts: 503"),
            "after 8 attempts: 503; the run",
        ),
        (FileNotFoundError("gone"), "it was deleted in the meantime"),
        (ZeroDivisionError("odd"), "ZeroDivisionError: odd"),
    ],
)
def test_what_fails_is_named(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, place: str, last: str | None) -> int:
        raise error

    copies = RunCopies(tmp_path, f"memory://{tmp_path.name}")
    monkeypatch.setattr(run_copies, "copy_tree", fail)
    copies.add(checkpoint(tmp_path, 4))
    (note,) = copies.wait(60)
    assert words in note
    assert "checkpoints/step-00000004" in note
    monkeypatch.undo()  # the next one is tried again
    copies.add(checkpoint(tmp_path, 8))
    (note,) = copies.wait(60)
    assert "step-00000008 copied to" in note
