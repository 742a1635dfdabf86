"""Whatever is written in whatever pieces is what the file holds, with O_DIRECT or without."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.system.storage import direct_file
from bigtrain.system.storage.direct_file import ALIGNMENT, DirectFile
from tests.support.tiers import examples


def write(path: Path, head: bytes, pieces: Sequence[bytes]) -> int:
    with DirectFile(path, len(head)) as file:
        for piece in pieces:
            file.write(memoryview(piece))
        return file.finish(head)


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(0, 20_000), max_size=12),
    num_pages=st.integers(0, 5),
    piece=st.sampled_from([4096, 8192, 1 << 14]),
)
def test_the_file_is_what_was_written(
    sizes: list[int], num_pages: int, piece: int, tmp_path_factory: Any
) -> None:
    """Buffers are smaller here, so that one write fills several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_file, "_PIECE_BYTES", piece)
        path = tmp_path_factory.mktemp("direct") / "file"
        head, pieces = os.urandom(num_pages * ALIGNMENT), [os.urandom(size) for size in sizes]
        assert write(path, head, pieces) == len(head) + sum(sizes)
        assert path.read_bytes() == head + b"".join(pieces)


@pytest.mark.parametrize("size", [0, 4096, 100_001])
def test_aligned_memory_is_written_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(direct_file, "_PIECE_BYTES", 1 << 14)
    memory = mmap.mmap(-1, size + ALIGNMENT)
    memory[:size] = content = os.urandom(size)
    path = tmp_path / "file"
    with DirectFile(path, ALIGNMENT) as file:
        file.append(memoryview(memory)[:size])
        assert file.finish(b"h" * ALIGNMENT) == ALIGNMENT + size
    assert path.read_bytes() == b"h" * ALIGNMENT + content


def test_an_older_longer_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    write(path, b"h" * ALIGNMENT, [b"data"])
    assert path.read_bytes() == b"h" * ALIGNMENT + b"data"


@pytest.mark.parametrize("where", ["open", "pwrite"])
def test_a_file_system_that_takes_no_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    refused = []
    real_open, real_pwrite = os.open, os.pwrite

    def refusing_open(path: Any, flags: int, *more: Any) -> int:
        if flags & direct_file._DIRECT:
            refused.append(flags)
            raise OSError(errno.EINVAL, "no")
        return real_open(path, flags, *more)

    def refusing_pwrite(fd: int, *more: Any) -> int:
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no")
        return real_pwrite(fd, *more)

    if where == "open":
        monkeypatch.setattr(os, "open", refusing_open)
    else:
        monkeypatch.setattr(os, "pwrite", refusing_pwrite)
    data = os.urandom(30_001)
    write(tmp_path / "file", b"", [data])
    assert refused
    assert (tmp_path / "file").read_bytes() == data


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", b"", [b"x" * 10])
