"""Base of the readers of all kinds of sources: documents, checksums, progress.

`bigtrain.data.documents.line_readers` and `bigtrain.data.documents.table_readers` contain the
subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import IO

import xxhash

from bigtrain.data.documents.bad_documents import BadDocument, Rejects
from bigtrain.data.documents.parts import Part, ReadOptions
from bigtrain.data.sources.files import READ_ERRORS, open_file
from bigtrain.data.sources.lines import HashingReader
from bigtrain.errors import DataError


class PartReader(ABC):
    """Iterator over the documents of `part`; usable once.

    `bytes_done` is updated for progress. After the iteration `num_lines` is the number of lines
    that started in the part (of a file of lines), and `checksum` and `layout` identify the content
    that was read. `places`: lines or rows of the documents of the last block, counted as in
    `BadDocument`; for conversations only.
    """

    def __init__(self, part: Part, options: ReadOptions, rejects: Rejects) -> None:
        self.part = part
        self.options = options
        self.rejects = rejects
        self.bytes_done = 0
        self.num_lines = 0
        self.places: list[int] = []
        self._hash = xxhash.xxh3_64()
        self._layout = xxhash.xxh3_64()

    def blocks(self) -> Iterator[list[bytes]]:
        """Yield the documents as UTF-8, in lists of those that were read together.

        Raises DataError with file and line of unreadable content (see `Rejects`), and for a file
        that is corrupt, or changed since it was listed.
        """
        try:
            yield from self._blocks()
        except READ_ERRORS as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise DataError(f"{self.part.source.path} cannot be read: {what}") from error
        self.bytes_done = self.part.num_bytes

    def checksum(self) -> str:
        """Return the checksum of the content read so far; see `PartRecord`."""
        return self._hash.hexdigest()

    def layout(self) -> str:
        """Return the checksum of everything except the bytes of `checksum` that determines the
        documents.

        For a byte range, the parts of its first and last line that lie outside of it; for a table,
        the starts of documents, and the rejected rows.
        """
        return self._layout.hexdigest()

    def update(self, data: bytes | memoryview, /) -> None:
        self._hash.update(data)
        self.bytes_done += len(data)

    def skim(self) -> None:
        """Compute `checksum` and `layout` only; for a checksum of bytes, without decompressing or
        parsing them. Raises as `blocks`."""
        try:
            with open_file(self.part.source, self.part.end_byte) as file:
                self._skim(file)
        except READ_ERRORS as error:
            raise DataError(f"{self.part.source.path} cannot be read: {error}") from error

    def reject_at(self, place: int, why: str) -> None:
        """Reject a document of `places` for a problem that was detected later."""
        self.rejects.add(BadDocument(self.part.source.path, why, row=place))

    @abstractmethod
    def _blocks(self) -> Iterator[list[bytes]]:
        """Yield the blocks; `blocks` adds the file to `READ_ERRORS`."""

    def _skim(self, file: IO[bytes]) -> None:
        HashingReader(file, self).drain()
