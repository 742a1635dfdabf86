"""Lines of streams and of byte ranges of files, in memory bounded by the longest line allowed.

A file can be split at any byte: the lines of a range [begin, end) are those that start in it, so
every line belongs to exactly one range, and ranges can be read independently.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any, Protocol

BLOCK_BYTES = 1 << 20
READ_AHEAD_BYTES = 1 << 25
"""Bytes that are requested from the disk or file server in advance: 0.2 s of tokenizing."""


class Digest(Protocol):
    """Incremental hash."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Update the hash with `data`."""


class ReadAhead:
    """Read-ahead requests for `file` (posix_fadvise). Does nothing for pipes.

    The range is `begin` to `end`, or to the end of the file.
    """

    def __init__(self, file: IO[bytes], begin: int = 0, end: int | None = None) -> None:
        self._file = file
        self._position = self._asked = begin
        self._end = end

    def follow(self, num_bytes: int) -> None:
        """Request read-ahead; call it before each read of `num_bytes`."""
        self._position += num_bytes
        ahead = self._position + READ_AHEAD_BYTES
        if self._end is not None:
            ahead = min(ahead, self._end)
        # Every request costs as much as a small read.
        if ahead - self._asked >= BLOCK_BYTES or ahead == self._end:
            size = ahead - self._asked
            with suppress(OSError, AttributeError):  # a pipe; an unsupported system
                if size > 0:
                    advice = os.POSIX_FADV_WILLNEED
                    os.posix_fadvise(self._file.fileno(), self._asked, size, advice)
            self._asked = ahead


class HashingReader(io.RawIOBase):
    """Reader of `raw` that updates `digest` with the bytes it reads."""

    def __init__(self, raw: IO[bytes], digest: Digest) -> None:
        self._raw: Any = raw
        self._digest = digest
        self._ahead = ReadAhead(raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._ahead.follow(len(buffer))
        count = int(self._raw.readinto(buffer))
        self._digest.update(memoryview(buffer)[:count])
        return count

    def drain(self) -> None:
        """Read to the end, for the hash."""
        while self.read(BLOCK_BYTES):
            pass


def stream_chunks(stream: IO[bytes], expected_bytes: int | None = None) -> Iterator[bytes]:
    """Yield all of `stream` in blocks, small ones if little is expected: a read costs its size."""
    size = BLOCK_BYTES if expected_bytes is None else min(BLOCK_BYTES, expected_bytes + 1)
    while chunk := stream.read(size):
        yield chunk


def range_chunks(
    file: IO[bytes], begin: int, end: int, digest: Digest, around: Digest
) -> Iterator[bytes]:
    """Yield the bytes of the lines of `file` that start in [begin, end).

    `digest` is updated with the bytes of [begin, end), `around` with the rest that determines the
    lines: whether a line continues at `begin`, and the rest of the last line. Raises EOFError if
    the file ends before `end`.
    """
    file.seek(max(0, begin - 1))
    inside_line = begin > 0 and file.read(1) != b"\n"
    around.update(b"inside" if inside_line else b"begins")
    file.seek(begin)
    position, unfinished = begin, False
    ahead = ReadAhead(file, begin, end)
    while position < end:
        ahead.follow(BLOCK_BYTES)
        chunk = file.read(min(BLOCK_BYTES, end - position))
        if not chunk:
            raise EOFError(f"it ends at byte {position}, before byte {end}")
        digest.update(chunk)
        position += len(chunk)
        if inside_line:  # that began in the previous range
            _, newline, chunk = chunk.partition(b"\n")
            inside_line = not newline
        if chunk:
            unfinished = not chunk.endswith(b"\n")
            yield chunk
    while unfinished and (chunk := file.read(BLOCK_BYTES)):
        head, newline, _ = chunk.partition(b"\n")
        unfinished = not newline
        around.update(head + newline)
        yield head + newline


def split_lines(chunks: Iterator[bytes], max_bytes: int) -> Iterator[list[bytes | None]]:
    """Yield the lines in `chunks` with their newlines, in a list per chunk.

    A line of more than `max_bytes` (without its newline) is None, and is never stored in memory.
    """
    parts: list[bytes] = []  # of the line that has not ended yet
    size = 0
    for chunk in chunks:
        # Four times as fast as `bytes.split`, which checks the bytes one by one.
        complete = io.BytesIO(chunk).readlines()
        rest = complete.pop() if complete and not chunk.endswith(b"\n") else b""
        if complete:
            lines: list[bytes | None] = [*complete]
            size += len(complete[0]) - 1
            lines[0] = None if size > max_bytes else b"".join([*parts, complete[0]])
            # A chunk can contain a line that is too long only if it is longer itself.
            if len(chunk) > max_bytes:
                lines = [None if line and len(line) > max_bytes + 1 else line for line in lines]
            yield lines
            parts, size = [], 0
        size += len(rest)
        if size > max_bytes:
            parts = []
        elif rest:
            parts.append(rest)
    if size:
        yield [None if size > max_bytes else b"".join(parts)]


def count_lines_before(file: IO[bytes], begin: int) -> int:
    """Return how many lines of the file start before byte `begin`. Reads all of them."""
    count = 0
    left, last = begin, b"\n"
    while left and (chunk := file.read(min(BLOCK_BYTES, left))):
        count += chunk.count(b"\n")
        left -= len(chunk)
        last = chunk[-1:]
    return count + (last != b"\n")
