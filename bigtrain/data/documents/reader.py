"""Base of the readers of all kinds of sources: documents, checksums, progress.

`bigtrain.data.documents.line_readers` and `bigtrain.data.documents.table_readers` contain the
subclasses.

Input splits: a source or a part of one, and how documents are extracted from it. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import xxhash

from bigtrain.data.documents.bad_documents import BadDocument, RejectedDocuments
from bigtrain.data.documents.chat_formats import FORMATS
from bigtrain.data.documents.fields import Conversations
from bigtrain.data.documents.table_rows import Keys
from bigtrain.data.shards.manifest import DEFAULT_MAX_DOCUMENT_BYTES
from bigtrain.data.sources.discovery import Selection, Source
from bigtrain.data.sources.files import READ_ERRORS, HashingReader, open_file
from bigtrain.errors import DataError


class PartReader(ABC):
    """Iterator over the documents of `part`; usable once.

    `bytes_done` is updated for progress. After the iteration `num_lines` is the number of lines
    that started in the part (of a file of lines), and `checksum` and `layout` identify the content
    that was read. `places`: lines or rows of the documents of the last block, counted as in
    `BadDocument`; for conversations only.
    """

    def __init__(self, part: Part, options: ReadOptions, rejects: RejectedDocuments) -> None:
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

        Raises DataError with file and line of unreadable content (see `RejectedDocuments`), and for
        a file that is corrupt, or changed since it was listed.
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

    def scan_layout(self) -> None:
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


@dataclass(frozen=True)
class ReadOptions:
    """Options for extracting documents from sources.

    `text_keys`: a row must have one of them; its non-empty ones are joined by a newline. `chat`:
    documents are conversations; `chat_format` defines the contents of the keys, of which a row must
    have the first (keys of a turn may follow), `last_only` whether only the last answer has loss,
    and `roles` the meaning of role names in the data, as ``NAME=ROLE``. `max_document_bytes`: of a
    document's UTF-8, or of its line in a file of lines. `scratch`: a folder for sources with
    `Source.needs_decompression`; must exist when documents are read.
    """

    selection: Selection
    text_keys: tuple[str, ...] = ("text",)
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    chat: bool = False
    chat_format: str = "messages"
    last_only: bool = False
    scratch: Path | None = None
    roles: tuple[str, ...] = ()

    @property
    def keys(self) -> Keys:
        chat = self.conversations
        if chat is not None:
            argument = "--chat-key" if self.chat_format == "messages" else "--format"
            return Keys(chat.columns[:1], chat.columns[1:], argument)
        return Keys(self.text_keys)

    @cached_property
    def conversations(self) -> Conversations | None:
        """Conversion of rows to conversations; None for text."""
        if not self.chat:
            return None
        known = FORMATS[self.chat_format]
        names = (*known.keys, *known.turn_keys)
        given = (*self.text_keys, *names[len(self.text_keys) :])
        keys, turn_keys = given[: len(known.keys)], given[len(known.keys) :]
        roles = dict(role.split("=", 1) for role in self.roles)
        return Conversations(known, keys, self.last_only, roles, turn_keys)

    @property
    def too_large(self) -> str:
        """Reason for rejecting a document or line of more than `max_document_bytes`."""
        return f"is larger than --max-document-bytes {self.max_document_bytes:,}"


@dataclass(frozen=True, slots=True)
class Part:
    """Input split: the part of a source that is read at once. `begin`, `end`: see `PartRecord`.

    `num_bytes`: its share of the source's bytes, 0 if unknown.
    """

    source: Source
    begin: int = 0
    end: int | None = None
    num_bytes: int = 0

    @property
    def end_byte(self) -> int | None:
        """`end` of a byte range; None for others."""
        return self.end if self.source.kind == "jsonl" else None


def whole(source: Source) -> Part:
    """Return all of `source` as one part."""
    return Part(source, num_bytes=source.record.bytes or 0)
