"""Decompression of files. The name, not the content, determines the compression."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_ARROW_WINDOW = 1 << 27
"""Bytes of a zstd window that Arrow accepts; ``zstd --long=28`` to ``31`` make larger ones."""
MAX_ZSTD_WINDOW = 1 << 31
ZSTD_HEADER_BYTES = 18
ZSTD_INPUT_BYTES = 1 << 11
"""Bytes that are decompressed at once: each may become 2^15 bytes of output."""


def _open_zstd(raw: Any) -> Any:
    """Open with Arrow's decompressor: `zstandard` treats a file that ends inside a frame as
    complete, or decompresses all of an input block at once. Only a file with a larger window than
    Arrow accepts, which needs that much memory, is read with `zstandard`, in small blocks."""
    import pyarrow
    import zstandard

    head = raw.read(ZSTD_HEADER_BYTES) or b""
    full_stream = _Prepended(head, raw)
    with suppress(zstandard.ZstdError):
        if zstandard.get_frame_parameters(head).window_size > MAX_ARROW_WINDOW:
            return io.BufferedReader(_LongWindowReader(full_stream))
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(full_stream, mode="r"), "zstd")


class _Prepended(io.RawIOBase):
    """Reader of `head`, then of `raw`."""

    def __init__(self, head: bytes, raw: Any) -> None:
        self._head = head
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._head:
            return int(self._raw.readinto(buffer))
        count = min(len(buffer), len(self._head))
        buffer[:count] = self._head[:count]
        self._head = self._head[count:]
        return count


class _LongWindowReader(io.RawIOBase):
    """Decompressed content of zstd frames with windows of up to 2 GiB. Raises EOFError if the file
    ends inside a frame."""

    def __init__(self, raw: io.RawIOBase) -> None:
        import zstandard

        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
        self._frame: Any = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self._output:
            self._input = self._input or self._raw.read(ZSTD_INPUT_BYTES) or b""
            if not self._input:
                if self._frame is not None:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            try:
                self._frame = self._frame or self._decompressor.decompressobj()
                self._output = self._frame.decompress(self._input)
            except zstandard.ZstdError as error:
                raise OSError(f"its zstd frames are corrupt: {error}") from error
            self._input = b""
            if self._frame.eof:  # the remaining input begins the next frame
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count


COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": _open_zstd,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
COMPRESSION_SUFFIXES = tuple(COMPRESSIONS)
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""Errors of reading a file, or of decompressing a corrupt one."""


def without_compression(name: str) -> str:
    """Return the name of a file without its compression suffix."""
    lower_name = name.lower()
    suffix = next((suffix for suffix in COMPRESSION_SUFFIXES if lower_name.endswith(suffix)), "")
    return name[: len(name) - len(suffix)]
