"""Lines of byte ranges: each in exactly one, whatever the cuts, and never held when too long."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.documents import files
from bigtrain.data.documents.files import range_chunks, split_lines, stream_chunks
from tests.support.tiers import examples


@pytest.fixture(autouse=True, params=[3, 1 << 20])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", request.param)


def flat(chunks: Iterator[bytes], limit: int = 1 << 20) -> list[bytes | None]:
    return [line for lines in split_lines(chunks, limit) for line in lines]


def hashes() -> tuple[xxhash.xxh3_64, xxhash.xxh3_64]:
    return xxhash.xxh3_64(), xxhash.xxh3_64()


CONTENT = st.lists(st.sampled_from([b"\n", b"a", b"\r\n", b"bcd"]), max_size=30).map(b"".join)


@settings(max_examples=examples(100))
@given(content=CONTENT, cuts=st.lists(st.integers(0, 60), max_size=5), limit=st.integers(1, 6))
def test_every_line_is_in_one_range(content: bytes, cuts: list[int], limit: int) -> None:
    lines = content.split(b"\n")
    expected = [line + b"\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])
    assert flat(stream_chunks(io.BytesIO(content))) == expected
    ends = sorted({0, len(content), *(min(cut, len(content)) for cut in cuts)})
    for shortened in (1 << 20, limit):
        all_lines: list[bytes | None] = []
        for begin, end in pairwise(ends):
            digest = xxhash.xxh3_64()
            part = flat(
                range_chunks(io.BytesIO(content), begin, end, digest, xxhash.xxh3_64()), shortened
            )
            assert digest.digest() == xxhash.xxh3_64_digest(content[begin:end])
            all_lines += part
        assert all_lines == [
            line if len(line.removesuffix(b"\n")) <= shortened else None for line in expected
        ]


def test_a_file_that_became_shorter() -> None:
    with pytest.raises(EOFError, match="it ends at byte 3, before byte 9"):
        flat(range_chunks(io.BytesIO(b"abc"), 0, 9, *hashes()))


@settings(max_examples=examples(100))
@given(content=CONTENT, cut=st.integers(0, 60), ahead=st.integers(1, 20))
def test_each_byte_of_a_range_is_asked_for_once_before_it_is_read(
    content: bytes, cut: int, ahead: int
) -> None:
    begin, asked, read = min(cut, len(content)), [], []

    class File(io.BytesIO):
        def fileno(self) -> int:
            return 7

        def read(self, size: int | None = -1) -> bytes:
            if self.tell() >= begin:
                read.append((self.tell(), sum(size for _, size in asked)))
            return super().read(size)

    def advise(descriptor: int, offset: int, size: int, advice: int) -> None:
        assert (descriptor, advice) == (7, os.POSIX_FADV_WILLNEED)
        asked.append((offset, size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fadvise", advise)
        patch.setattr(files, "READ_AHEAD_BYTES", ahead)
        list(range_chunks(File(content), begin, len(content), *hashes()))
    position = begin
    for offset, size in asked:
        assert offset == position
        position += size
    assert position == (len(content) if begin < len(content) else begin)
    for at, so_far in read:
        if at < len(content):
            assert begin + so_far >= min(len(content), at + min(files.BLOCK_BYTES, ahead))


def test_a_pipe_is_read_without_asking_ahead() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(b"some\nlines\n")
    digest = xxhash.xxh3_64()
    with os.fdopen(reader, "rb", buffering=0) as raw:
        assert files.HashingReader(raw, digest).read() == b"some\nlines\n"
    assert digest.digest() == xxhash.xxh3_64_digest(b"some\nlines\n")
