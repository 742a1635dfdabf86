"""Base of the readers of all kinds of sources: documents, checksums, progress.

`bigtrain.data.documents.line_readers` and `bigtrain.data.documents.table_readers` have the kinds.
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
    """Iterates once over the documents of `part`.

    `bytes_done` follows for progress. At the end `num_lines` is how many lines of a file of lines
    started in the part, and `checksum` and `layout` what was read. `places` are the lines or rows
    of the documents of the last block, as `BadDocument` counts them; of conversations alone.
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
        """The documents as UTF-8, in lists of those that were read together.

        Raises DataError naming file and line of what cannot be read (see `Rejects`), and for a file
        that is corrupt, or changed since it was listed.
        """
        try:
            yield from self._blocks()
        except READ_ERRORS as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise DataError(f"{self.part.source.path} cannot be read: {what}") from error
        self.bytes_done = self.part.num_bytes

    def checksum(self) -> str:
        """Of what was read so far; see `PartRecord`."""
        return self._hash.hexdigest()

    def layout(self) -> str:
        """Checksum of what decides the documents besides the bytes of `checksum`.

        Of a byte range what of its first and last line lies outside; of tables where documents
        begin, and the rows that are none.
        """
        return self._layout.hexdigest()

    def update(self, data: bytes | memoryview, /) -> None:
        self._hash.update(data)
        self.bytes_done += len(data)

    def skim(self) -> None:
        """Read what `checksum` and `layout` are of; of bytes of a file, without decompressing or
        parsing them. Raises as `blocks`."""
        try:
            with open_file(self.part.source) as file:
                self._skim(file)
        except READ_ERRORS as error:
            raise DataError(f"{self.part.source.path} cannot be read: {error}") from error

    def reject_at(self, place: int, why: str) -> None:
        """Reject a document of `places` for what was found wrong with it later."""
        self.rejects.add(BadDocument(self.part.source.path, why, row=place))

    @abstractmethod
    def _blocks(self) -> Iterator[list[bytes]]:
        """As `blocks`, which names the file in `READ_ERRORS`."""

    def _skim(self, file: IO[bytes]) -> None:
        HashingReader(file, self).drain()
