"""The digest of bigtrain's source is read from the cache until a file changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bigtrain.system import user_cache

HOUR_AGO_NANOSECONDS = 3600 * 10**9


def edit(path: Path) -> None:
    """Change a file's content, neither its size nor the time of its modification."""
    times = path.stat()
    path.write_text("b = 1")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def add(path: Path) -> None:
    path.with_name("new.py").write_text("a = 1")


def rename(path: Path) -> None:
    path.rename(path.with_name("other.py"))


def add_folder(path: Path) -> None:
    (path.parent / "inner").mkdir()
    (path.parent / "inner" / "new.py").write_text("a = 1")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source file of a package that takes the place of bigtrain, whose files changed long ago."""
    package = tmp_path / "package"
    (package / "system").mkdir(parents=True)
    path = package / "system" / "module.py"
    path.write_text("a = 1")
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "__file__", str(package / "system" / "user_cache.py"))
    now = user_cache.time.time_ns() + HOUR_AGO_NANOSECONDS
    monkeypatch.setattr(user_cache.time, "time_ns", lambda: now)
    return path


def digests(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Callable[[], bytes]]:
    """Return a list with an entry for each reading of the files, and a function that returns the
    digest as another process would."""
    readings: list[int] = []
    read = user_cache.source_of

    def counted(*files: str) -> bytes:
        readings.append(len(files))
        return read(*files)

    monkeypatch.setattr(user_cache, "source_of", counted)
    return readings, user_cache.package_source.__wrapped__


@pytest.mark.parametrize("change", [edit, add, rename, add_folder])
def test_files_are_read_again_after_a_change(
    change: Callable[[Path], None], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, digest = digests(monkeypatch)
    first = digest()
    assert digest() == first
    assert readings == [1]
    change(source)
    assert digest() == digest()
    assert len(readings) == 2
    if change is not rename:  # the digest is of the contents, in the order of the names
        assert digest() != first


def test_the_digest_of_fresh_files_is_not_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could change in the same tick of the file system's clock."""
    monkeypatch.setattr(user_cache.time, "time_ns", lambda: source.stat().st_ctime_ns + 10**9)
    readings, digest = digests(monkeypatch)
    assert digest() == digest()
    assert readings == [1, 1]


def test_an_entry_that_is_no_digest_is_replaced(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    readings, digest = digests(monkeypatch)
    first = digest()
    (entry,) = (tmp_path / "cache" / "source_digests").iterdir()
    entry.write_text('{"sha256": "7"}')
    assert digest() == first
    assert readings == [1, 1]
