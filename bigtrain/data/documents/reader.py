"""Base of the readers of documents: options, input splits, checksums, progress, bad documents."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from bigtrain.data.documents.chat_formats import FORMATS, NAME_A_KEY, ONE_FORMAT, Conversations
from bigtrain.data.documents.compression import READ_ERRORS
from bigtrain.data.documents.files import HashingReader, Selection, Source, open_file
from bigtrain.data.documents.key_rules import KeyCounts, KeyRules, text_rules
from bigtrain.data.documents.table_rows import Keys
from bigtrain.data.documents.text_filter import TextFilter, text_of_document
from bigtrain.data.shards.manifest import DEFAULT_MAX_DOCUMENT_BYTES, Quotes
from bigtrain.errors import DataError

OTHER_KEYS = re.compile(rf"^no key .*; keys here: (.*(?!{NAME_A_KEY}) -> |(?:.*, )?text\b)")
"""Pattern of reasons for rows with the keys of another format: the fix is other than to name a key,
or the row has the key text."""
TEMPLATE_FAULT = "the chat template"
"""Start of reasons caused by the chat template, not by a document."""


@dataclass(frozen=True)
class BadDocument:
    """Location of an unusable document, and the reason. `line` counts from 1, `row` from 0; neither
    for a file that is one document. Lines count from the start of the file, or of the part that one
    unit reads."""

    path: str
    reason: str
    line: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        location = self.path
        if self.line is not None:
            location += f":{self.line}"
        elif self.row is not None:
            location += f" row {self.row}"
        return f"{location}: {self.reason}"


@dataclass
class RejectedDocuments:
    """Collector of unreadable documents. Unless `allowed`, the first is an error. Otherwise each is
    counted and passed to `keep`. `filtered`: documents that the user's filter drops, by reason;
    `keys`: rows that have each key."""

    allowed: bool
    keep: Callable[[BadDocument], None] | None = None
    count: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    keys: KeyCounts = field(default_factory=KeyCounts)

    def add(self, bad: BadDocument) -> None:
        """Record `bad`. Raise DataError with location and reason unless these are allowed."""
        if not self.allowed:
            if bad.reason.startswith(TEMPLATE_FAULT) and " -> " in bad.reason:
                raise DataError(str(bad))  # few documents would remain if these were skipped
            has_fix = " -> " in str(bad)
            skip = "skip such documents: --skip-bad"
            if OTHER_KEYS.search(bad.reason):
                first_fix = " if all rows are like this one" if has_fix else " -> fix it"
                raise DataError(f"{bad}{first_fix}; {ONE_FORMAT}; or {skip}")
            raise DataError(f"{bad}{', or' if has_fix else ' -> fix it, or'} {skip}")
        self.count += 1
        if self.keep is not None:
            self.keep(bad)


def require_few(bad: int, good: int, max_fraction: float, first: str) -> None:
    """Raise DataError if `bad` of `bad + good` documents are more than `max_fraction`. first: the
    first bad document, for the error."""
    if bad > max_fraction * (bad + good):
        raise DataError(
            f"{bad:,} of {bad + good:,} documents cannot be read, more than --max-bad-fraction "
            f"{max_fraction:g} allows; the first is {first} -> fix them, or allow more"
        )


class PartReader(ABC):
    """Iterator over the documents of `part`; usable once. A subclass declares one format:

    `format_name`: name in messages and unit keys. `suffixes`: of files; `folder_suffixes`: of files
    that are read from a folder without ``--suffix``. `has_rows`: rows with keys, which may be
    conversations. `random_access`: a compressed file is decompressed first. `hashes_documents`: the
    checksum covers the documents instead of the file's bytes. `first_row_keys` and `split` are
    optional.

    `bytes_done` is updated for progress. After the iteration `num_lines` is the number of lines
    that started in the part (of a file of lines), and `checksum` and `layout` identify the content
    that was read. `places`: line or row, as in `BadDocument`, of every document of the last block;
    for conversations only.
    """

    format_name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    folder_suffixes: ClassVar[tuple[str, ...]] = ()
    has_rows: ClassVar[bool] = True
    random_access: ClassVar[bool] = False
    hashes_documents: ClassVar[bool] = False

    def __init__(self, part: SourcePart, options: ReadOptions, rejects: RejectedDocuments) -> None:
        self.part = part
        self.options = options
        self.rejects = rejects
        self.bytes_done = 0
        self.num_lines = 0
        self.places: list[int] = []
        self._hash = xxhash.xxh3_64()
        self._layout = xxhash.xxh3_64()

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        """Return the keys of the first row. Raises DataError and `READ_ERRORS`."""
        return ()

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        """Return `source` in parts of about `shard_bytes`; by default as one part."""
        return [unsplit(source)]

    def blocks(self) -> Iterator[list[bytes]]:
        """Yield the documents as UTF-8, in lists of documents that were read together. Raises
        DataError with file and line of unreadable content (see `RejectedDocuments`), and for a file
        that is corrupt, or changed since it was listed."""
        try:
            yield from self._blocks()
        except READ_ERRORS as error:
            description = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise DataError(f"{self.part.source.path} cannot be read: {description}") from error
        self.bytes_done = self.part.num_bytes

    def checksum(self) -> str:
        """Return the checksum of the content read so far; see `PartRecord`."""
        return self._hash.hexdigest()

    def layout(self) -> str:
        """Return the checksum of what else determines the documents. For a byte range, the parts
        of the first and last line that are outside of the range; for a table, the starts of
        documents, and the rejected rows."""
        return self._layout.hexdigest()

    def update(self, data: bytes | memoryview, /) -> None:
        self._hash.update(data)
        self.bytes_done += len(data)

    def scan_layout(self) -> None:
        """Compute `checksum` and `layout` only; for a checksum of bytes, without decompressing or
        parsing them. Raises as `blocks`."""
        try:
            self._hash_part()
        except READ_ERRORS as error:
            raise DataError(f"{self.part.source.path} cannot be read: {error}") from error

    def reject_at(self, position: int, reason: str) -> None:
        """Reject a document of `places` for a problem that was detected later."""
        self.rejects.add(BadDocument(self.part.source.path, reason, row=position))

    def is_kept(self, content: bytes, row: Mapping[str, Any], location: str) -> bool:
        """Return whether the user's filter keeps a document of `row`; count it if not. `location`:
        for errors of the filter, which raise DataError."""
        if self.options.text_filter is None:
            return True
        text = text_of_document(content, has_rows=self.options.chat)
        drop_reason = self.options.text_filter.why_dropped(text, row, location)
        if drop_reason is not None:
            self.options.text_filter.count(self.rejects.filtered, drop_reason)
        return drop_reason is None

    @abstractmethod
    def _blocks(self) -> Iterator[list[bytes]]:
        """Yield the blocks. May raise `READ_ERRORS`, to which `blocks` adds the file's name."""

    def _hash_part(self) -> None:
        """Hash the bytes of the part, and what else `layout` covers."""
        with open_file(self.part.source) as file:
            HashingReader(file, self).drain()


@dataclass(frozen=True)
class ReadOptions:
    """Options for extracting documents from sources.

    `text_keys`: a row must have a text key; non-empty texts are joined by a newline. `chat`:
    documents are conversations; `chat_format` defines the contents of the keys, of which a row must
    have the first (keys of a turn may follow), `last_only` whether only the last answer has loss,
    and `roles` the meaning of role names in the data, as ``NAME=ROLE``. `max_document_bytes`: of a
    document's UTF-8, or of a line in a file of lines. `scratch`: existing folder for sources with
    `Source.needs_decompression`. `text_filter`: drops documents. `ignored_keys`: of a row, not to
    be read. `quotes`: meaning of a quote at the beginning of a field of csv and tsv; None: it
    quotes, and is refused in tsv where it may be a letter.
    """

    selection: Selection
    text_keys: tuple[str, ...] = ("text",)
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    chat: bool = False
    chat_format: str = "messages"
    last_only: bool = False
    scratch: Path | None = None
    roles: tuple[str, ...] = ()
    text_filter: TextFilter | None = None
    ignored_keys: tuple[str, ...] = ()
    quotes: Quotes | None = None

    @cached_property
    def keys(self) -> Keys:
        """Columns to read from a table."""
        chat, reads_all = self.conversations, self.text_filter is not None
        if chat is not None:
            argument = "--chat-key" if self.chat_format == "messages" else "--format"
            return Keys(chat.columns[:1], chat.columns[1:], argument, reads_all)
        return Keys(self.text_keys, tuple(self.key_rules.refused), all_columns=reads_all)

    @cached_property
    def key_rules(self) -> KeyRules:
        """Rules for the keys of a row."""
        if self.conversations is not None:
            return self.conversations.key_rules
        return text_rules(self.text_keys, self.ignored_keys)

    @cached_property
    def conversations(self) -> Conversations | None:
        """Conversion of rows to conversations; None for text."""
        if not self.chat:
            return None
        row_format = FORMATS[self.chat_format]
        # The user's keys replace the format's, first of a row and then of a turn.
        names = (*row_format.keys, *row_format.turn_keys)
        all_keys = (*self.text_keys, *names[len(self.text_keys) :])
        keys, turn_keys = all_keys[: len(row_format.keys)], all_keys[len(row_format.keys) :]
        roles = dict(role.split("=", 1) for role in self.roles)
        return Conversations(
            row_format, keys, self.last_only, roles, turn_keys, ignored=self.ignored_keys
        )

    @property
    def too_large(self) -> str:
        """Reason for rejecting a document or line of more than `max_document_bytes`."""
        return f"is larger than --max-document-bytes {self.max_document_bytes:,}"


@dataclass(frozen=True, slots=True)
class SourcePart:
    """Input split: the part of a source that is read at once. `begin`, `end`: see `PartRecord`.
    `num_bytes`: its share of the source's bytes, 0 if unknown."""

    source: Source
    begin: int = 0
    end: int | None = None
    num_bytes: int = 0


def unsplit(source: Source) -> SourcePart:
    """Return all of `source` as one part."""
    return SourcePart(source, num_bytes=source.record.bytes or 0)


def even_parts(source: Source, count: int, shard_bytes: int | None) -> list[SourcePart]:
    """Return parts with ranges of about `shard_bytes` of `count` items of equal size; without
    `shard_bytes` one item each."""
    num_bytes = source.record.bytes or 0
    num_wanted = count if shard_bytes is None else -(-num_bytes // shard_bytes)
    num_parts = max(1, min(count, num_wanted))
    boundaries = [count * i // num_parts for i in range(num_parts + 1)]
    byte_offsets = [num_bytes * boundary // max(1, count) for boundary in boundaries]
    return [
        SourcePart(source, boundaries[i], boundaries[i + 1], byte_offsets[i + 1] - byte_offsets[i])
        for i in range(num_parts)
    ]
