"""Input splits: a source or a part of one, and how documents are extracted from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bigtrain.data.documents.chat_formats import FORMATS
from bigtrain.data.documents.fields import Conversations
from bigtrain.data.documents.table_rows import Keys
from bigtrain.data.shards.manifest import DEFAULT_MAX_DOCUMENT_BYTES
from bigtrain.data.sources.discovery import Selection, Source


@dataclass(frozen=True)
class ReadOptions:
    """Options for extracting documents from sources.

    `text_keys`: a row must have one of them; its non-empty ones are joined by a newline. `chat`:
    documents are conversations; `chat_format` defines the contents of the keys, of which a row must
    have the first (keys of a turn may follow), `last_only` whether only the last answer has loss,
    and `roles` the meaning of role names in the data, as ``NAME=ROLE``. `max_document_bytes`: of a
    document's UTF-8, or of its line in a file of lines. `scratch`: a folder for sources with
    `Source.is_unpacked`; must exist when documents are read.
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
