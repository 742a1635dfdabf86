"""Files of real servers, read over lines that break: the bytes are those on the disk."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bigtrain.system.storage import remote_file, stores
from bigtrain.system.storage.remote_file import RemoteFile, store_of
from bigtrain.system.storage.stores import (
    AccessDeniedError,
    ModifiedError,
    NotFoundError,
    RetryPolicy,
    StorageError,
)
from tests.support.remote_servers import S3_VARIABLES, BreakingLine, WebServer, s3_server

CONTENT = random.Random(7).randbytes(3_000_000)
SOON = RetryPolicy(tries=3, sleep=lambda seconds: None)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exit_stack:
        yield exit_stack


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "RETRIES", SOON)


def address_of(
    kind: str,
    folder: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    breaks: tuple[int, ...] = (),
    site: WebServer | None = None,
) -> tuple[str, BreakingLine]:
    """Of ``folder/bucket/a.bin``, behind a line that breaks there."""
    (folder / "bucket").mkdir(exist_ok=True)
    (folder / "bucket/a.bin").write_bytes(CONTENT)
    if kind == "s3":
        port = stack.enter_context(s3_server(folder))
    else:
        port = stack.enter_context((site or WebServer(folder)).running())
    line = BreakingLine(port, breaks)
    port = stack.enter_context(line.running())
    if kind == "http":
        return f"http://127.0.0.1:{port}/bucket/a.bin", line
    for name, value in S3_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    return "s3://bucket/a.bin", line


@pytest.mark.parametrize(("kind", "ahead"), [("http", True), ("http", False), ("s3", True)])
def test_a_broken_line_is_resumed_at_its_byte(
    kind: str,
    ahead: bool,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = WebServer(tmp_path)
    address, line = address_of(kind, tmp_path, stack, monkeypatch, (900_000, 1_800_000), site)
    known = store_of(address).stat(address)
    assert known.size == len(CONTENT)
    assert known.version
    with caplog.at_level(logging.WARNING), RemoteFile(address, known, known.size, ahead=ahead) as f:
        assert f.read() == CONTENT
    assert line.broken == 2
    # What had arrived is not asked for again: a few headers are all that came twice.
    assert line.passed < len(CONTENT) * 1.35
    if kind == "http":
        begins = [int(asked[6:].partition("-")[0]) for _, asked in site.requests[2:]]
        assert len(begins) == 2
        assert 800_000 < begins[0] < begins[1] < 1_800_000
        assert "resuming there" in caplog.text


def test_reading_here_and_there(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "WINDOW_BYTES", 10_000)
    address, _ = address_of("http", tmp_path, stack, monkeypatch)
    chance = random.Random(3)
    known = store_of(address).stat(address)
    for end in (None, 1_000_000):
        with RemoteFile(address, known, end) as file:
            for _ in range(40):
                begin, size = (
                    chance.randrange(len(CONTENT)),
                    chance.choice([1, 500, 20_000, 300_000]),
                )
                file.seek(begin)
                assert file.tell() == begin
                assert file.read(size) == CONTENT[begin : begin + size]
                assert file.read(7) == CONTENT[begin + size : begin + size + 7]
            assert file.seek(-5, os.SEEK_END) == len(CONTENT) - 5
            assert file.read() == CONTENT[-5:]
            assert file.read(1) == b""


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_changed_file_is_refused(
    kind: str, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = address_of(kind, tmp_path, stack, monkeypatch)
    known = store_of(address).stat(address)
    with RemoteFile(address, known) as file:
        file.read(10)
        changed = bytes(reversed(CONTENT))
        (tmp_path / "bucket/a.bin").write_bytes(changed)
        os.utime(tmp_path / "bucket/a.bin", (1, 1))
        file.seek(2_000_000)
        with pytest.raises(
            ModifiedError, match=r"a\.bin was changed while it was read -> start again"
        ):
            file.read(10)


@pytest.mark.parametrize(
    ("ranges", "etags", "dates", "early"),
    [
        (False, True, True, 0),
        (False, False, False, 0),
        (True, False, True, 0),
        (True, True, True, 1 << 20),
    ],
)
def test_servers_that_can_less(
    ranges: bool,
    etags: bool,
    dates: bool,
    early: int,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = WebServer(tmp_path, ranges=ranges, etags=etags, dates=dates, early=early)
    address, line = address_of("http", tmp_path, stack, monkeypatch, (1_500_000,), site)
    known = store_of(address).stat(address)
    assert (known.version is None, known.modified_ns is None) == (not etags, not dates)
    line.passed = 0
    with RemoteFile(address, known, known.size) as file:
        assert file.read() == CONTENT
    assert line.broken == 1


def test_what_cannot_be_read(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    site = WebServer(tmp_path, password="letmein")
    address, _ = address_of("http", tmp_path, stack, monkeypatch, (), site)
    store = store_of(address)
    with pytest.raises(AccessDeniedError, match=r"a\.bin cannot be read: 401 .*netrc"):
        store.stat(address)
    host = address.removeprefix("http://")
    with pytest.raises(AccessDeniedError) as refused:
        store.stat(f"http://me:wrong@{host}?token=abc")
    assert not {"wrong", "abc"} & set(str(refused.value).replace("=", " ").split())
    assert store.stat(f"http://me:letmein@{host}").size == len(CONTENT)
    with pytest.raises(NotFoundError, match="does not exist"):
        store.stat(f"http://me:letmein@{host}.gone")
    address, _ = address_of("s3", tmp_path, stack, monkeypatch)
    with pytest.raises(NotFoundError, match="s3://bucket/none does not exist"):
        store_of(address).stat("s3://bucket/none")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID") as refused:
        store_of(address).stat(address)
    assert S3_VARIABLES["AWS_SECRET_ACCESS_KEY"] not in str(refused.value)


def test_a_server_that_is_gone_is_given_up(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as first:
        address, _ = address_of("http", tmp_path, first, monkeypatch)
        known = store_of(address).stat(address)
    with RemoteFile(f"{address}?token=abc", known) as file:
        with pytest.raises(StorageError, match="beyond byte 0 after 3 attempts") as error:
            file.read(1)
    assert "abc" not in str(error.value)


def test_other_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fsspec's own."""
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe_file("/folder/a.bin", CONTENT)
    files.pipe_file("/folder/b/c.bin", b"c")
    address = "memory://folder/a.bin"
    store = store_of(address)
    known = store.stat(address)
    with RemoteFile(address, known, known.size) as file:
        assert file.read(5) == CONTENT[:5]
        assert file.read() == CONTENT[5:]
    assert [a for a, _ in store.find("memory://folder")] == [
        "memory://folder/a.bin",
        "memory://folder/b/c.bin",
    ]
    with pytest.raises(NotFoundError):
        store.stat("memory://folder")
    with pytest.raises(StorageError, match="nosuch"):
        store_of("nosuch://x").stat("nosuch://x")
