"""Decompression of files whose format needs random access (parquet, arrow), before reading.

The target is an unnamed temporary file, so nothing remains of it after the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from bigtrain.data.sources.discovery import Source
from bigtrain.data.sources.files import open_stream
from bigtrain.data.sources.lines import Digest, stream_chunks
from bigtrain.errors import DataError


@contextmanager
def unpacked(source: Source, digest: Digest, scratch: Path) -> Iterator[IO[bytes]]:
    """Yield the decompressed file of `source`, in a temporary file in the folder `scratch`.

    `digest` is updated with the bytes of the compressed file. Raises `READ_ERRORS` if that cannot
    be read or is corrupt, and DataError if the disk is full, or it was changed since it was listed.
    """
    with ExitStack() as stack:
        with _writing(source, scratch):
            # Linux creates it without a name; elsewhere the name is removed right after creation.
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch, buffering=0))
        with open_stream(source, digest) as stream:
            for chunk in stream_chunks(stream):
                with _writing(source, scratch):
                    _write(file, chunk)
        with _writing(source, scratch):
            os.fsync(file.fileno())  # a network file system reports only here that it is full
            file.seek(0)
        yield file


def _write(file: IO[bytes], chunk: bytes) -> None:
    """Write all of `chunk`: an unbuffered file may accept less at once."""
    left = memoryview(chunk)
    while left:
        left = left[file.write(left) :]


@contextmanager
def _writing(source: Source, scratch: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{source.path} cannot be decompressed into {scratch}, which {source.kind} requires "
            f"before it is read: {error.strerror or error} -> make room there for the "
            "largest such file, once for each of --workers, or decompress it yourself"
        ) from error
