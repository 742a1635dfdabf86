"""A file written with O_DIRECT, bypassing the page cache, in large aligned pieces by a thread.

A write through the page cache copies every byte in the kernel, and the disk is mostly idle until
the fsync. Here the disk reads straight from the caller's memory (`append`), or from one of two
buffers while the second is filled (`write`). Where a file system does not support O_DIRECT (tmpfs,
some network file systems), the same pieces are written without it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

ALIGNMENT = 4096
"""Alignment of positions, lengths and memory; no disk requires more."""
_PIECE_BYTES = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only


class DirectFile:
    """A new file at `path`: content from byte `begin` on (a multiple of `ALIGNMENT`) is written in
    order, the header before it last (`finish`). Raises OSError."""

    def __init__(self, path: Path, begin: int) -> None:
        assert begin % ALIGNMENT == 0, begin
        # Not every file system supports O_DIRECT, and some report it at the first write only.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags, 0o666)
        self._begin, self._position = begin, begin
        self._buffers = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(2)]
        self._filled = 0
        self._writer = ThreadPoolExecutor(1, "direct-file")
        self._pending: deque[Future[None]] = deque()

    def write(self, data: memoryview) -> None:
        """Append a copy of `data`: the caller may change it once this returns."""
        position = 0
        while position < len(data):
            piece = data[position : position + _PIECE_BYTES - self._filled]
            self._buffers[0][self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            position += len(piece)
            if self._filled == _PIECE_BYTES:
                self._send()

    def append(self, data: memoryview) -> None:
        """Append `data` without a copy; must be the only append. `data` starts at a multiple of
        `ALIGNMENT` in memory, and must not change before `finish` returns."""
        assert self._position == self._begin
        assert not self._filled
        aligned = len(data) // ALIGNMENT * ALIGNMENT
        for low in range(0, aligned, _PIECE_BYTES):
            piece = data[low : min(low + _PIECE_BYTES, aligned)]
            self._pending.append(self._writer.submit(self._write, piece, self._position + low))
        self._position += aligned
        self.write(data[aligned:])

    def finish(self, head: bytes) -> int:
        """Write the header `head` (`begin` bytes), fsync the file, and return its size in bytes."""
        assert len(head) == self._begin, (len(head), self._begin)
        num_bytes = self._position + self._filled
        if self._filled:
            self._send()
        self._wait(0)
        for low in range(0, len(head), _PIECE_BYTES):
            piece = head[low : low + _PIECE_BYTES]
            self._buffers[0][: len(piece)] = piece
            self._write(memoryview(self._buffers[0])[: len(piece)], low)
        os.ftruncate(self._fd, num_bytes)
        os.fsync(self._fd)
        return num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown(cancel_futures=True)
        os.close(self._fd)

    def _send(self) -> None:
        """Submit the filled buffer to the thread, and switch buffers."""
        size = -(-self._filled // ALIGNMENT) * ALIGNMENT  # `finish` truncates the excess
        piece = memoryview(self._buffers[0])[:size]
        self._pending.append(self._writer.submit(self._write, piece, self._position))
        self._position += self._filled
        self._filled = 0
        self._buffers.reverse()
        self._wait(1)  # until the buffer to fill next has been written

    def _wait(self, num_left: int) -> None:
        while len(self._pending) > num_left:
            self._pending.popleft().result()

    def _write(self, data: memoryview, position: int) -> None:
        """Write all of `data`; without O_DIRECT once the file system refuses it."""
        written = 0
        while written < len(data):
            try:
                written += os.pwrite(self._fd, data[written:], position + written)
            except OSError as error:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
