"""Opens the files of sources: decompressed, hashed as stored, and checked to be unchanged."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bigtrain.data.sources.discovery import Source
from bigtrain.data.sources.lines import Digest, HashingReader
from bigtrain.errors import DataError


def _open_zstd(raw: Any) -> Any:
    """Arrow's: `zstandard` takes the end of a file inside a frame for the end of the data, or
    decompresses all that a block of input gives at once."""
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": _open_zstd,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What reading a file, or decompressing a corrupt one, raises."""


@contextmanager
def open_file(source: Source) -> Iterator[IO[bytes]]:
    """The source's file, checked to be unchanged since it was listed, before and after the block.

    Raises as `require_unchanged`; opening and reading raise `READ_ERRORS`.
    """
    with open(source.path, "rb", buffering=0) as file:
        require_unchanged(source, file.fileno())
        yield file
        require_unchanged(source, file.fileno())


@contextmanager
def open_stream(source: Source, digest: Digest) -> Iterator[IO[bytes]]:
    """The decompressed content of the file; `digest` gets the bytes of the file as stored.

    Raises as `open_file`.
    """
    with open_file(source) as file:
        raw = HashingReader(file, digest)
        opener = COMPRESSIONS.get(Path(source.path).suffix)
        if opener is None:
            yield raw  # type: ignore[misc]
        else:
            with opener(raw) as stream:
                yield stream
        raw.drain()


def stream_bytes(source: Source) -> int | None:
    """The number of bytes of `open_stream`, if known."""
    return None if source.compressed or source.read_once else source.record.bytes


def require_unchanged(source: Source, descriptor: int | None = None) -> None:
    """Raises DataError if size or time of the file have changed since it was listed.

    `descriptor`: of the file, if it is open.
    """
    if source.read_once or source.record.modified_ns is None or os.path.isdir(source.path):
        return
    status = os.stat(source.path if descriptor is None else descriptor)
    if (status.st_size, status.st_mtime_ns) != (source.record.bytes, source.record.modified_ns):
        raise DataError(
            f"{source.path} was changed while it was read -> start again when it is complete"
        )
