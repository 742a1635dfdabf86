"""Opening of the files of sources: decompressed, hashed as stored, and checked to be unchanged."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from bigtrain.data.sources.discovery import Source
from bigtrain.data.sources.lines import Digest, HashingReader
from bigtrain.errors import DataError
from bigtrain.system.storage.open_store import store_of
from bigtrain.system.storage.remote_file import RemoteFile
from bigtrain.system.storage.retries import persistently


def _open_zstd(raw: Any) -> Any:
    """Open with Arrow's decompressor: `zstandard` treats a file that ends inside a frame as
    complete, or decompresses all of an input block at once."""
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": _open_zstd,
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""Errors of reading a file, or of decompressing a corrupt one."""


@contextmanager
def open_file(source: Source, end: int | None = None) -> Iterator[IO[bytes]]:
    """Yield the source's file, checked to be unchanged since it was listed, before and after the
    block.

    `end`: end of sequential reading, for read-ahead over a network; without it the end of the file.
    Raises as `require_unchanged`, and StorageError for a file at an address; opening and reading
    raise `READ_ERRORS`.
    """
    if source.address is not None:
        # Every response contains its version, and one other than the listed version is refused.
        size = source.record.bytes
        with RemoteFile(source.address, source.stat, size if end is None else end) as remote:
            yield cast(IO[bytes], remote)
        return
    where = 0 if source.is_standard_input else source.path
    with open(where, "rb", buffering=0, closefd=not source.is_standard_input) as file:
        require_unchanged(source, file.fileno())
        yield file
        require_unchanged(source, file.fileno())


def open_table(source: Source) -> Any:
    """Return pyarrow's input for a table that is not decompressed: a path, or a remote file."""
    if source.address is None:
        return source.path
    return RemoteFile(source.address, source.stat)


@contextmanager
def open_stream(source: Source, digest: Digest, *, whole: bool = True) -> Iterator[IO[bytes]]:
    """Yield the decompressed content of the file; `digest` is updated with the bytes as stored.

    whole: read them to the end for it, regardless of the block's reads. Raises as `open_file`.
    """
    with open_file(source) as file:
        raw = HashingReader(file, digest)
        opener = COMPRESSIONS.get(source.file_name[source.file_name.rfind(".") :].lower())
        if opener is None:
            yield raw  # type: ignore[misc]
        else:
            with opener(raw) as stream:
                yield stream
        if whole:
            raw.drain()


def stream_bytes(source: Source) -> int | None:
    """Return the number of bytes of `open_stream`, if known."""
    return None if source.compressed or source.read_once else source.record.bytes


def require_unchanged(source: Source, descriptor: int | None = None) -> None:
    """Raise DataError if size or time of the file have changed since it was listed; for a remote
    file, its version.

    `descriptor`: of the file, if it is open.
    """
    if source.read_once:
        return
    if source.address is not None:
        store, address = store_of(source.address), source.address
        now = persistently(address, "cannot be read", lambda: store.stat(address))
        same = source.stat.is_same(now)
    elif source.record.modified_ns is None or os.path.isdir(source.path):
        return
    else:
        status = os.stat(source.path if descriptor is None else descriptor)
        known = (source.record.bytes, source.record.modified_ns)
        same = (status.st_size, status.st_mtime_ns) == known
    if not same:
        raise DataError(
            f"{source.path} was changed while it was read -> start again when it is complete"
        )
