"""Decompresses files whose format needs random access (parquet, arrow) before they are read.

Into an unnamed temporary file, so that nothing is left of it however the process ends.
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
    """What the file of `source` holds, in a file in the folder `scratch` that is gone afterwards.

    `digest` is given the bytes of the compressed file. Raises `READ_ERRORS` where that cannot be
    read or is corrupt, and DataError where there is no room, or it was changed since it was listed.
    """
    with ExitStack() as stack:
        with _writing(source, scratch):
            # Linux makes it without a name; elsewhere the name goes as soon as the file is there.
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch, buffering=0))
        with open_stream(source, digest) as stream:
            for chunk in stream_chunks(stream):
                with _writing(source, scratch):
                    _write(file, chunk)
        with _writing(source, scratch):
            os.fsync(file.fileno())  # a network file system tells only here that it is full
            file.seek(0)
        yield file


def _write(file: IO[bytes], chunk: bytes) -> None:
    """All of `chunk`: what an unbuffered file takes at once may be less."""
    left = memoryview(chunk)
    while left:
        left = left[file.write(left) :]


@contextmanager
def _writing(source: Source, scratch: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{source.path} cannot be decompressed into {scratch}, as {source.kind} must be before "
            f"it is read: {error.strerror or error} -> make room there for the largest such file, "
            "once for each of --workers, or decompress it yourself"
        ) from error
