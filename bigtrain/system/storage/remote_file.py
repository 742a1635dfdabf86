"""Remote file as an open file: seekable, with read-ahead, resumed after a lost connection.

One interface to all storage systems from which files are read, and to which they are copied.

============== ================================================= ===================================
scheme         by                                                credentials
============== ================================================= ===================================
http, https    requests                                          ~/.netrc, or in the address
s3, gs, az     obstore                                           AWS_*, GOOGLE_*, AZURE_*, the
                                                                 machine's role
all others     the fsspec file system of that name (`hf` is      as that file system has them
               huggingface_hub's)                                (HF_TOKEN)
============== ================================================= ===================================
"""

from __future__ import annotations

import io
import logging
from collections import deque
from collections.abc import Iterator
from threading import Condition, Thread
from typing import Any

from bigtrain.errors import without_secrets
from bigtrain.system.storage import stores
from bigtrain.system.storage.fsspec_store import FsspecStore
from bigtrain.system.storage.http_store import HttpStore
from bigtrain.system.storage.object_store import ObjectStore
from bigtrain.system.storage.stores import (
    RemoteStat,
    StorageError,
    Store,
    TransientError,
    scheme_of,
)

logger = logging.getLogger(__name__)

AHEAD_BYTES = 1 << 25
"""Bytes read ahead for a sequential reader."""
WINDOW_BYTES = 1 << 20
"""Smallest request of a random-access reader."""


def resumed(
    store: Store, address: str, listed: RemoteStat, begin: int, end: int | None
) -> Iterator[bytes | memoryview]:
    """Yield bytes [begin, end) of a file that matches `listed`; without `end`, to its end.

    After a lost connection, reading resumes at the first byte that has not arrived. Raises
    StorageError after `stores.RETRIES` without another byte, ModifiedError for a changed file.
    """
    failed = 0
    while True:
        try:
            for chunk in store.read(address, begin, end, listed):
                if len(chunk):
                    begin += len(chunk)
                    failed = 0
                    yield chunk
            return
        except TransientError as error:
            failed += 1
            name, reason = without_secrets(address), without_secrets(str(error))
            if failed >= stores.RETRIES.tries:
                raise StorageError(
                    f"{name} cannot be read beyond byte {begin:,} after {failed} attempts: {reason}"
                ) from None
            logger.warning(
                "%s: connection lost at byte %s (%s); resuming there", name, f"{begin:,}", reason
            )
            stores.RETRIES.wait(failed)


class RemoteFile(io.RawIOBase):
    """File at `address`, which was listed as `listed`.

    `end`: for sequential reading, the byte at which it stops; a thread reads ahead up to there.
    Otherwise, and beyond it, every read is a separate request. A read returns fewer bytes than
    requested only at the end of the file. Raises as `resumed`.
    """

    def __init__(
        self, address: str, listed: RemoteStat, end: int | None = None, *, ahead: bool = True
    ) -> None:
        self._store = store_of(address)
        self._address = address
        self._listed = listed
        self._end = end
        self._ahead = ahead
        self._position = 0
        self._chunks: Iterator[bytes | memoryview] | None = None
        self._chunk = memoryview(b"")  # the unread part of the last chunk
        self._chunk_position = 0  # position of its first byte in the file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._listed.size is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = self._listed.size
        if size is None:
            raise io.UnsupportedOperation("the server does not report the size of the file")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def size(self) -> int | None:
        return self._listed.size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            if not self._chunk or self._chunk_position != self._position:
                if not self._advance(len(view) - filled):
                    break
                continue
            count = min(len(self._chunk), len(view) - filled)
            view[filled : filled + count] = self._chunk[:count]
            self._chunk = self._chunk[count:]
            self._chunk_position += count
            self._position += count
            filled += count
        return filled

    def close(self) -> None:
        self._stop()
        super().close()

    def _advance(self, num_bytes: int) -> bool:
        """Make `_chunk` begin at the position; return False at the end of the file. num_bytes: to
        request, if a new request is needed."""
        # The next chunk of the stream, or the part of this chunk after the position.
        if self._chunks is not None and self._chunk_position + len(self._chunk) == self._position:
            self._chunk_position = self._position
            chunk = next(self._chunks, None)
            if chunk is not None:
                self._chunk = memoryview(chunk).cast("B")
                return True
        elif self._chunk_position < self._position < self._chunk_position + len(self._chunk):
            self._chunk = self._chunk[self._position - self._chunk_position :]
            self._chunk_position = self._position
            return True
        self._stop()
        size = self._listed.size
        if size is not None and self._position >= size:
            return False
        if size is None and self._chunk_position:  # the stream to its unknown end is over
            return False

        # A new request: to the end of a sequential reader's range, or of the bytes to read.
        begin = self._position
        if size is None:
            end: int | None = None
        elif self._end is not None and begin < self._end:
            end = min(size, self._end)
        else:
            end = min(size, begin + max(num_bytes, WINDOW_BYTES))
        chunks = resumed(self._store, self._address, self._listed, begin, end)
        is_long = end is None or end - begin > WINDOW_BYTES
        reads_ahead = self._ahead and self._end is not None and is_long
        self._chunks = _Ahead(chunks) if reads_ahead else chunks
        self._chunk_position = begin
        chunk = next(self._chunks, None)
        self._chunk = memoryview(b"" if chunk is None else chunk).cast("B")
        return chunk is not None

    def _stop(self) -> None:
        if isinstance(self._chunks, _Ahead):
            self._chunks.close()
        self._chunks = None
        self._chunk = memoryview(b"")


class _Ahead(Iterator[bytes | memoryview]):
    """Iterator that a thread reads `AHEAD_BYTES` ahead."""

    def __init__(self, chunks: Iterator[bytes | memoryview]) -> None:
        self._waiting: deque[bytes | memoryview] = deque()
        self._num_bytes = 0
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._turn = Condition()
        Thread(target=self._fetch, args=[chunks], daemon=True).start()

    def __next__(self) -> bytes | memoryview:
        with self._turn:
            self._turn.wait_for(lambda: self._waiting or self._ended)
            if not self._waiting:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            chunk = self._waiting.popleft()
            self._num_bytes -= len(chunk)
            self._turn.notify()
            return chunk

    def close(self) -> None:
        """Stop the thread after its current read."""
        with self._turn:
            self._closed = True
            self._turn.notify()

    def _fetch(self, chunks: Iterator[bytes | memoryview]) -> None:
        error: BaseException | None = None
        try:
            for chunk in chunks:
                with self._turn:
                    self._turn.wait_for(lambda: self._closed or self._num_bytes < AHEAD_BYTES)
                    if self._closed:
                        break
                    self._waiting.append(chunk)
                    self._num_bytes += len(chunk)
                    self._turn.notify()
        except BaseException as raised:
            error = raised
        with self._turn:
            self._error, self._ended = error, True
            self._turn.notify()


def store_of(address: str) -> Store:
    """Return the store for the scheme of `address`. Raise StorageError if the scheme is unknown."""
    scheme = scheme_of(address)
    if scheme in ("http", "https"):
        return HttpStore()
    if scheme in ("s3", "s3a", "gs", "az", "abfs", "abfss"):
        return ObjectStore()
    return FsspecStore(scheme)
