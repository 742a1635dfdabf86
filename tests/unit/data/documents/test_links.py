"""Links in folders of inputs, and what is no file: one rule, and nothing in silence."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bigtrain.cli import main
from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.errors import DataError
from tests.support.datasets import write_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of a folder, and a secret beside it."""
    place = tmp_path / "in"
    (place / "sub").mkdir(parents=True)
    (place / "a.txt").write_text("a")
    (place / "sub" / "b.txt").write_text("b")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("key")
    return place


def names_of_sources(
    folder: object, follow: bool = False, exclude: tuple[str, ...] = ()
) -> list[str]:
    selection = Selection([str(folder)], exclude=exclude, follow_links=follow)
    return [Path(source.path).name for source in find_sources(selection)]


@pytest.mark.parametrize(("where", "target"), [("", "secret"), ("sub", "secret/key.txt")])
def test_a_link_out_of_the_folder_is_refused_by_name(folder: Path, target: str, where: str) -> None:
    link = folder / where / ("c.txt" if target.endswith("txt") else "more")
    link.symlink_to(folder.parent / target)
    with pytest.raises(DataError) as caught:
        names_of_sources(folder)
    below = link.relative_to(folder)
    assert str(caught.value) == (
        f"--input {folder}: {link} is a link to {folder.parent / target}, outside of the folder -> "
        f"--follow-links to read the targets of links, or --exclude {below}"
    )
    assert names_of_sources(folder, exclude=(str(below),)) == ["a.txt", "b.txt"]
    names = names_of_sources(folder, follow=True)
    assert sorted(names) == sorted(["a.txt", "b.txt", "c.txt" if "txt" in target else "key.txt"])


def test_links_of_links_are_followed_to_their_end(folder: Path) -> None:
    (folder / "first.bin").symlink_to(folder.parent / "secret" / "key.txt")
    (folder / "c.txt").symlink_to("first.bin")
    with pytest.raises(DataError, match=r"c.txt is a link to .*key.txt, outside of the folder"):
        names_of_sources(folder)


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.txt", "*/*.txt"])
def test_globs_are_as_folders(folder: Path, pattern: str) -> None:
    """Also through a folder that is a link."""
    (folder / "c.txt").symlink_to(folder.parent / "secret" / "key.txt")
    (folder / "more").symlink_to(folder.parent / "secret")
    with pytest.raises(DataError, match="outside of the folder"):
        names_of_sources(folder / pattern)
    assert ("key.txt" in names_of_sources(folder / pattern, follow=True)) == (pattern == "*/*.txt")


@pytest.mark.parametrize("follow", [False, True])
def test_a_file_is_read_once_by_whatever_links(
    folder: Path, follow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "again.txt").symlink_to("a.txt")
    (folder / "loop").symlink_to(".")
    (folder / "also").symlink_to("sub")
    assert names_of_sources(folder, follow) == ["a.txt", "b.txt"]
    said = " ".join(record.message for record in caplog.records)
    assert "1 links to files that are inputs themselves are not read again" in said
    assert "loop is a link to" in said
    assert "also is a link to" in said


def test_a_link_to_a_file_that_is_no_input_itself(folder: Path) -> None:
    (folder / "data.bin").write_text("text")
    (folder / "c.txt").symlink_to("data.bin")
    (folder / "d.txt").symlink_to("data.bin")
    assert names_of_sources(folder) == ["a.txt", "c.txt", "b.txt"]


def test_a_snapshot_of_the_hub_has_its_blobs(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "123").write_text("a")
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "a.txt").symlink_to("../../blobs/123")
    assert names_of_sources(snapshot) == ["a.txt"]


def test_a_named_link_is_followed(folder: Path) -> None:
    link = folder / "c.txt"
    link.symlink_to(folder.parent / "secret" / "key.txt")
    assert names_of_sources(link) == ["c.txt"]
    (folder.parent / "in2").symlink_to(folder.parent / "secret")
    assert names_of_sources(folder.parent / "in2") == ["key.txt"]


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, r"is not a regular file \(a pipe, socket or device\) -> name it as"),
        (_socket, r"is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path.name), "is a link to .*, which cannot be read"),
        (lambda path: path.symlink_to("gone"), "is a link to gone, which cannot be read"),
    ],
)
def test_what_is_no_file_is_refused(
    folder: Path, make: Callable[[Path], object], words: str
) -> None:
    make(folder / "c.txt")
    for follow in (False, True):
        with pytest.raises(DataError, match=words):
            names_of_sources(folder, follow)
        with pytest.raises(DataError, match=words):
            names_of_sources(folder / "*.txt", follow)
    assert names_of_sources(folder, exclude=("c.txt",)) == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("suffix", "make"), [*((s, os.mkfifo) for s in ("json", "idx", "bin", "blocks")),
                         ("json", os.mkdir)],
)  # fmt: skip
def test_a_dataset_with_what_is_no_file_does_not_wait(
    suffix: str, make: Callable[[Path], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_dataset(tmp_path / "d", vocab_size=50)
    path = min(dataset.glob(f"*.{suffix}"))
    path.unlink()
    make(path)
    assert main(["inspect", str(dataset)]) == 2
    assert f"{path} cannot be read: not a regular file" in capsys.readouterr().err
    if suffix == "json":
        with pytest.raises(DataError, match="not a regular file"):
            read_manifest(dataset)
