"""Documents of sources and of parts of them, in memory bounded by the longest one allowed."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson
import xxhash

from bigtrain.data import tables
from bigtrain.data.bad_documents import BadDocument, Rejects
from bigtrain.data.conversations import ConversationError, conversation_bytes
from bigtrain.data.lines import (
    HashingReader,
    count_lines_before,
    range_chunks,
    split_lines,
    stream_chunks,
)
from bigtrain.data.manifest import DEFAULT_MAX_DOCUMENT_BYTES
from bigtrain.data.sources import Selection, Source
from bigtrain.data.tables import Keys, Rows, arrow_rows, csv_rows, dataset_rows, parquet_rows
from bigtrain.data.text_columns import TextColumn
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
T = TypeVar("T")
TABLES = ("parquet", "arrow", "dataset_file", "saved_dataset", "hub_dataset")
"""Kinds whose checksum is of documents; of the others it is of bytes of the file."""
READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError)
JOINED_WITH = "\n"
TOOLS_KEY = "tools"
"""Where data sets of conversations keep the tools of one, beside its messages."""
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 2048


@dataclass(frozen=True)
class ReadOptions:
    """How documents are taken out of sources.

    `text_keys`: of several, those that a document has and that are not empty are joined by a line
    end; it must have one of them. `chat`: the only key holds a conversation, and the key ``tools``,
    where there is one, its tools (`bigtrain.data.chat`). `max_document_bytes`: of a document's
    UTF-8, or of its whole line in a file of lines.
    """

    selection: Selection
    text_keys: tuple[str, ...] = ("text",)
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    chat: bool = False

    @property
    def keys(self) -> Keys:
        """The columns of a table that are read."""
        if self.chat:
            return Keys(self.text_keys, (TOOLS_KEY,), "--chat-key")
        return Keys(self.text_keys)


@dataclass(frozen=True)
class Part:
    """What of a source is read at once: `begin` and `end` as in `PartRecord`.

    `num_bytes`: its share of the source's bytes, 0 where these are not known.
    """

    source: Source
    begin: int = 0
    end: int | None = None
    num_bytes: int = 0


def whole(source: Source) -> Part:
    """All of `source` as one part."""
    return Part(source, num_bytes=source.record.bytes or 0)


@dataclass
class PartReader:
    """Iterates once over the documents of `part`.

    `bytes_done` follows for progress. At the end `num_lines` is how many lines of a file of lines
    started in the part, and `checksum` and `layout` what was read. `places` are the lines or rows
    of the documents of the last block, as `BadDocument` counts them; of conversations alone.
    """

    part: Part
    options: ReadOptions
    rejects: Rejects
    bytes_done: int = 0
    num_lines: int = 0
    places: list[int] = field(default_factory=list)
    _hash: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    _layout: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    def blocks(self) -> Iterator[list[bytes]]:
        """The documents as UTF-8, in lists of those that were read together.

        Raises DataError naming file and line of what cannot be read (see `Rejects`), and for a file
        that is damaged, or changed since it was listed.
        """
        read = {"text": self._text, "jsonl": self._json_lines, "csv": self._csv}
        path = self.part.source.path
        try:
            yield from read.get(self.part.source.kind, self._table)()
        except READ_ERRORS as error:
            what = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise DataError(f"{path} cannot be read: {what}") from error
        self.bytes_done = self.part.num_bytes

    def checksum(self) -> str:
        """Of what was read so far; see `PartRecord`."""
        return self._hash.hexdigest()

    def layout(self) -> str:
        """Checksum of what decides the documents besides the bytes of `checksum`.

        Of a byte range what of its first and last line lies outside; of tables where documents
        begin, and the rows that are none. A part with the same two gives the same documents.
        """
        return self._layout.hexdigest()

    def skim(self) -> None:
        """Read what `checksum` and `layout` are of, and nothing more where that is bytes of a file.

        A file is hashed as it lies there, neither decompressed nor parsed. Raises as `blocks`.
        """
        part = self.part
        if part.source.kind in TABLES:
            for _ in self.blocks():
                pass
            return
        try:
            with self._file() as file:
                if part.end is None:
                    HashingReader(file, self._counted()).drain()
                    return
                for _ in self._range_chunks(file, part.begin, part.end):
                    pass
        except READ_ERRORS as error:
            raise DataError(f"{part.source.path} cannot be read: {error}") from error

    def reject_at(self, place: int, why: str) -> None:
        """Reject a document of `places` for what was found wrong with it later."""
        if self.part.source.kind in ("jsonl", "csv"):
            self._reject_line(place, why)
        else:
            self.rejects.add(BadDocument(self.part.source.path, why, row=place))

    def _text(self) -> Iterator[list[bytes]]:
        path, limit = self.part.source.path, self.options.max_document_bytes
        parts: list[bytes] = []
        size = 0
        with self._stream() as stream:
            for chunk in stream_chunks(stream, self._stream_bytes()):
                size += len(chunk)
                if size > limit:
                    break
                parts.append(chunk)
        if size > limit:
            self.rejects.add(BadDocument(path, f"the document {self._too_large()}"))
            return
        content = b"".join(parts)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            self.rejects.add(BadDocument(path, f"not UTF-8 ({error.reason})", line=line))
        else:
            yield [content]

    def _json_lines(self) -> Iterator[list[bytes]]:
        part = self.part
        if part.end is None:
            with self._stream() as stream:
                yield from self._parsed(stream_chunks(stream))
            return
        with self._file() as file:
            yield from self._parsed(self._range_chunks(file, part.begin, part.end))

    def _range_chunks(self, file: IO[bytes], begin: int, end: int) -> Iterator[bytes]:
        return range_chunks(file, begin, end, self._counted(), self._layout)

    def _parsed(self, chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
        for lines in split_lines(chunks, self.options.max_document_bytes):
            yield self._parse(lines)
            self.num_lines += len(lines)

    def _parse(self, lines: Sequence[bytes | None]) -> list[bytes]:
        """Documents of `lines`, which follow `num_lines` others."""
        keys = self.options.text_keys
        if self.options.chat:
            numbered = enumerate(lines, self.num_lines + 1)
            chats = [(number, self._parse_line(number, line)) for number, line in numbered]
            self.places = [number for number, content in chats if content is not None]
            return [content for _, content in chats if content is not None]
        try:
            # What orjson refuses, and it refuses more than json does, is looked at one by one.
            if len(keys) == 1:
                key = keys[0]
                return [orjson.loads(line)[key].encode() for line in lines]  # type: ignore[arg-type]
            return [_joined(orjson.loads(line), keys) for line in lines]  # type: ignore[arg-type]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            parsed = (self._parse_line(n, line) for n, line in enumerate(lines, self.num_lines + 1))
            return [content for content in parsed if content is not None]

    def _parse_line(self, number: int, line: bytes | None) -> bytes | None:
        if line is None:
            self._reject_line(number, f"the line {self._too_large()}")
            return None
        if number == 1 and self.part.begin == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            return None
        try:
            # orjson is several times quicker and refuses more: numbers beyond 64 bits, for one.
            document = orjson.loads(line) if self.options.chat else json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            self._reject_line(number, f"not UTF-8 ({error.reason})")
        except (ValueError, RecursionError) as error:
            self._reject_line(number, f"not JSON ({error})")
        else:
            if not isinstance(document, dict):
                self._reject_line(number, f"not a JSON object but {type(document).__name__}")
                return None
            keys = self.options.text_keys
            found = [key for key in keys if key in document]
            if found and self.options.chat:
                content, why = _conversation([document[found[0]], document.get(TOOLS_KEY)], keys[0])
            elif found:
                content, why = _content([document[key] for key in found], found)
            else:
                there = ", ".join(sorted(document)[:20]) or "none"
                content, why = None, f"no key {' or '.join(map(repr, keys))}; keys here: {there}"
            if content is not None:
                return content
            self._reject_line(number, why)
        return None

    def _reject_line(self, number: int, why: str) -> None:
        """`number` counts from the beginning of the part; an error names the line of the file."""
        if not self.rejects.allowed and self.part.begin:
            number += count_lines_before(self.part.source.path, self.part.begin)
        self.rejects.add(BadDocument(self.part.source.path, why, line=number))

    def _csv(self) -> Iterator[list[bytes]]:
        options, path = self.options, self.part.source.path
        with self._stream() as stream:
            chunks = stream_chunks(stream)
            rows = csv_rows(path, options.keys, chunks, options.max_document_bytes, self.rejects)
            for line, values in rows:
                self.places = []
                yield [c for c in self._contents(values, line=line, hashed=False)]

    def _table(self) -> Iterator[list[bytes]]:
        part, keys = self.part, self.options.keys
        source = part.source
        blocks: Iterator[tuple[int, Rows | TextColumn]]
        if source.kind == "parquet":
            blocks = parquet_rows(source.path, keys, part.begin, part.end)
        elif source.kind == "arrow":
            blocks = arrow_rows(source.path, keys, part.begin, part.end)
        else:
            blocks = dataset_rows(source, self.options.selection, keys, part.begin, part.end)
        blocks = self._followed(blocks)
        self._require_unchanged()
        for row, values in blocks:
            self.places = []
            if isinstance(values, TextColumn) and self._as_it_stands(values):
                self._hash.update(values.joined)
                contents = values.contents
            else:
                rows = values.rows() if isinstance(values, TextColumn) else values
                contents = list(self._contents(rows, row=row, hashed=True))
            self._layout.update(array("q", [row, *map(len, contents)]).tobytes())
            yield contents
        self._require_unchanged()

    def _as_it_stands(self, column: TextColumn) -> bool:
        """Whether `_contents` would take every row, and as it is."""
        limit = self.options.max_document_bytes
        return not self.options.chat and max(map(len, column.contents), default=0) <= limit

    def _contents(
        self,
        rows: Sequence[Sequence[Any]],
        *,
        hashed: bool,
        row: int | None = None,
        line: int | None = None,
    ) -> Iterator[bytes]:
        """The rows that are documents; the first is row number `row`, or the one in `line`."""
        for number, values in enumerate(rows):
            if self.options.chat:
                content, why = _conversation(values, self.options.text_keys[0])
            else:
                content, why = _content(values, self.options.text_keys)
            if content is not None and len(content) > self.options.max_document_bytes:
                content, why = None, f"the document {self._too_large()}"
            if content is None:
                at = None if row is None else row + number
                self._layout.update(f"{at} {why}".encode())
                self.rejects.add(BadDocument(self.part.source.path, why, line=line, row=at))
                continue
            self.places.append(line if line is not None else (row or 0) + number)
            if hashed:
                self._hash.update(content)
            yield content

    def _followed(self, blocks: Iterator[tuple[int, T]]) -> Iterator[tuple[int, T]]:
        """The same `blocks`; `bytes_done` follows where it is known how many rows there are."""
        part = self.part
        first, count = part.begin, 0
        if part.source.kind == "parquet":
            rows = tables.count_row_groups(part.source.path)
            first, count = sum(rows[: part.begin]), sum(rows[part.begin : part.end])
        elif part.source.kind == "saved_dataset" and part.end is not None:
            count = part.end - part.begin
        for row, values in blocks:
            if count:
                self.bytes_done = part.num_bytes * (row - first) // count
            yield row, values

    @contextmanager
    def _file(self) -> Iterator[IO[bytes]]:
        """The source's file, which must be as it was listed, and still be so at the end."""
        with open(self.part.source.path, "rb", buffering=0) as file:
            self._require_unchanged(file.fileno())
            yield file
            self._require_unchanged(file.fileno())

    @contextmanager
    def _stream(self) -> Iterator[IO[bytes]]:
        """All that the file holds, decompressed; the bytes of the file itself are hashed."""
        with self._file() as file:
            raw = HashingReader(file, self._counted())
            opener = COMPRESSIONS.get(Path(self.part.source.path).suffix)
            if opener is None:
                yield raw  # type: ignore[misc]
            else:
                with opener(raw) as stream:
                    yield stream
            raw.drain()

    def _stream_bytes(self) -> int | None:
        """How many bytes `_stream` gives, where that is known."""
        source = self.part.source
        return None if source.compressed or source.read_once else source.record.bytes

    def _counted(self) -> _CountedHash:
        return _CountedHash(self)

    def _require_unchanged(self, descriptor: int | None = None) -> None:
        source = self.part.source
        if source.read_once or source.record.modified_ns is None or os.path.isdir(source.path):
            return
        status = os.stat(source.path if descriptor is None else descriptor)
        if (status.st_size, status.st_mtime_ns) != (source.record.bytes, source.record.modified_ns):
            raise DataError(
                f"{source.path} was changed while it was read -> start again when it is complete"
            )

    def _too_large(self) -> str:
        limit = self.options.max_document_bytes
        return f"is larger than --max-document-bytes {limit:,}"


@dataclass
class _CountedHash:
    """The reader's hash, which counts what goes into it."""

    reader: PartReader

    def update(self, data: bytes | memoryview, /) -> None:
        self.reader._hash.update(data)
        self.reader.bytes_done += len(data)


class DocumentReader:
    """Iterates over the documents of `sources`, in order. `bytes_done` follows for progress."""

    def __init__(self, sources: Sequence[Source], options: ReadOptions, rejects: Rejects) -> None:
        self.sources = sources
        self.options = options
        self.rejects = rejects
        self.num_documents = 0
        self.bytes_done = 0
        sizes = [source.record.bytes for source in sources]
        self.total_bytes = None if None in sizes else sum(size or 0 for size in sizes)

    def __iter__(self) -> Iterator[str]:
        """Raises DataError naming file and line of what cannot be read; see `Rejects`."""
        for block in self.blocks():
            for content in block:
                yield content.decode("utf-8")

    def blocks(self) -> Iterator[list[bytes]]:
        """The documents as UTF-8, in lists of those that were read together; raises as above."""
        finished = 0
        for source in self.sources:
            reader = PartReader(whole(source), self.options, self.rejects)
            for documents in reader.blocks():
                self.bytes_done = finished + reader.bytes_done
                self.num_documents += len(documents)
                yield documents
            finished += source.record.bytes or 0
            self.bytes_done = finished

    def text_batches(self) -> Iterator[list[str]]:
        """The documents as texts, in lists of about a million bytes."""
        for contents in batched(self.blocks()):
            yield [content.decode("utf-8") for content in contents]


def batched(blocks: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """The documents of `blocks` in lists of about a million bytes, at least one each."""
    batch: list[bytes] = []
    size = 0
    for block in blocks:
        for content in block:
            batch.append(content)
            size += len(content)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _conversation(values: Sequence[Any], key: str) -> tuple[bytes | None, str]:
    """The document of messages and tools, or None and why there is none."""
    try:
        return conversation_bytes(*values), ""
    except ConversationError as error:
        return None, f"{key!r} is no conversation: {error}"


def _joined(document: Any, keys: Sequence[str]) -> bytes:
    """Raises LookupError, TypeError or ValueError where `_content` finds something wrong."""
    content, why = _content([document[key] for key in keys if key in document], keys)
    if content is None:
        raise LookupError(why)
    return content


def _content(values: Sequence[Any], keys: Sequence[str]) -> tuple[bytes | None, str]:
    """The document of these values, or None and why there is none."""
    given = [value for value in values if value is not None]
    wrong = next((value for value in given if not isinstance(value, str)), None)
    if wrong is not None or not given:
        found = "nothing" if wrong is None else type(wrong).__name__
        return None, f"{' or '.join(map(repr, keys))} is not text but {found}"
    text = given[0] if len(given) == 1 else JOINED_WITH.join(filter(None, given))
    try:
        return text.encode("utf-8"), ""
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # csv's, of a byte that is not UTF-8
            return None, "not UTF-8, or half of a surrogate pair"
        return None, "the text holds half of a surrogate pair"
