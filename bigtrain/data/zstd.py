"""Reading .zst files, with an error where one was cut short."""

from __future__ import annotations

import io
from typing import IO, Any

import zstandard

READ_BYTES = 1 << 16


def open_zstd(raw: IO[bytes]) -> IO[bytes]:
    """The decompressed content of `raw`, all frames of it.

    Reading raises EOFError where the file ends inside a frame (zstandard's own reader takes that
    for the end of the data) and OSError where it is damaged.
    """
    return io.BufferedReader(_Frames(raw), buffer_size=1 << 20)


class _Frames(io.RawIOBase):
    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame: Any = None
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            data = b""
            if self._frame is not None and self._frame.eof:
                data, self._frame = self._frame.unused_data, None
            data = data or self._raw.read(READ_BYTES)
            if not data:
                if self._frame is not None:
                    raise EOFError("the compressed file ends before its end-of-stream mark")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                self._decompressed = memoryview(self._frame.decompress(data))
            except zstandard.ZstdError as error:
                raise OSError(f"damaged: {error}") from error
        count = min(len(buffer), len(self._decompressed))
        buffer[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count
