"""Readers of text files, one document each, and of JSON files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import IO, Any, ClassVar

import orjson
import xxhash

from bigtrain.data.documents.chat_formats import document_in, text_of, value_at
from bigtrain.data.documents.exact_json import loads
from bigtrain.data.documents.files import (
    BYTE_ORDER_MARK,
    Source,
    count_lines_before,
    not_utf8,
    open_file,
    open_stream,
    range_chunks,
    split_lines,
    stream_bytes,
    stream_chunks,
    without_mark,
)
from bigtrain.data.documents.reader import (
    BadDocument,
    PartReader,
    ReadOptions,
    SourcePart,
    even_parts,
    unsplit,
)
from bigtrain.errors import DataError

MAX_LIST_BYTES = 1 << 31
"""Limit of a .json file that is one list, which is parsed at once."""
HEAD_BYTES = 1 << 20
"""Bytes read for the first object of a .json file, which may be one line."""
ROWS_PER_BLOCK = 1024


class TextReader(PartReader):
    """Reader of a file that is one document, unmodified but for a byte order mark."""

    kind = "text"
    suffixes = folder_suffixes = (".txt",)
    has_rows = False

    def _blocks(self) -> Iterator[list[bytes]]:
        source, limit = self.part.source, self.options.max_document_bytes
        parts: list[bytes] = []
        size = 0
        with open_stream(source, self) as stream:
            for chunk in stream_chunks(stream, stream_bytes(source)):
                size += len(chunk)
                if size > limit:
                    why = f"the document {self.options.too_large}"
                    self.rejects.add(BadDocument(source.path, why))
                    return
                parts.append(chunk)
        content = b"".join(parts).removeprefix(BYTE_ORDER_MARK)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            why = not_utf8(content, error.reason)
            self.rejects.add(BadDocument(source.path, why, line=line))
        else:
            if self.is_kept(content, {}, source.path):
                yield [content]


class JsonLinesReader(PartReader):
    """Reader of a file, or of a byte range of it, with one JSON object per line."""

    kind = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    folder_suffixes: ClassVar[tuple[str, ...]] = (".jsonl",)

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        for line in first_lines(source, options.max_document_bytes):
            if line.strip():
                try:
                    tree = loads(line)
                except ValueError:
                    return ()
                return list(tree) if isinstance(tree, dict) else ()
        return ()

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        if source.compressed or source.record.bytes is None:
            return [unsplit(source)]
        return even_parts(source, source.record.bytes, shard_bytes)

    def reject_at(self, place: int, why: str) -> None:
        """Reject the line at `place` in the part; an error names the line of the file."""
        if not self.rejects.allowed and self.part.begin:
            with open_file(self.part.source, self.part.begin) as file:
                place += count_lines_before(file, self.part.begin)
        self.rejects.add(BadDocument(self.part.source.path, why, line=place))

    def _blocks(self) -> Iterator[list[bytes]]:
        source = self.part.source
        if self.part.end is None:
            with open_stream(source, self) as stream:
                yield from self._parsed(stream_chunks(stream))
            return
        with open_file(source, self.part.end) as file:
            yield from self._parsed(self._range_chunks(file, self.part.end))

    def _end_byte(self) -> int | None:
        return self.part.end

    def _skim(self, file: IO[bytes]) -> None:
        if self.part.end is None:
            super()._skim(file)
            return
        for _ in self._range_chunks(file, self.part.end):
            pass

    def _range_chunks(self, file: IO[bytes], end: int) -> Iterator[bytes]:
        return range_chunks(file, self.part.begin, end, self, self._layout)

    def _parsed(self, chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
        for lines in split_lines(chunks, self.options.max_document_bytes):
            yield self._parse(lines)
            self.num_lines += len(lines)

    def _parse(self, lines: Sequence[bytes | None]) -> list[bytes]:
        """Return the documents of `lines`, which follow `num_lines` others."""
        if not self.options.chat and self.options.text_filter is None:
            texts = self._texts(lines)
            if texts is not None:
                return texts
        numbered = enumerate(lines, self.num_lines + 1)
        read = [(number, self._parse_line(number, line)) for number, line in numbered]
        self.places = [number for number, content in read if content is not None]
        return [content for _, content in read if content is not None]

    def _texts(self, lines: Sequence[bytes | None]) -> list[bytes] | None:
        """Return the texts of `lines`, several times faster than one by one; None if one of them
        may not be a text, or has a key that may be refused."""
        keys, refused = self.options.text_keys, self.options.key_rules.refused.keys()
        try:
            rows: list[dict[str, Any]] = [orjson.loads(line) for line in lines]  # type: ignore[arg-type]
            shapes = Counter(map(tuple, rows))
            if any(not refused.isdisjoint(shape) for shape in shapes):
                return None
            if len(keys) == 1:
                texts = [row[keys[0]].encode() for row in rows]
            else:
                texts = [_text_in(row, keys) for row in rows]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        # Of two equal keys orjson drops one.
        for key in keys:
            spelled = f'"{key}"'.encode()
            num_spelled = sum(line.count(spelled) for line in lines if line)
            if num_spelled != sum(count for shape, count in shapes.items() if key in shape):
                return None
        for shape, count in shapes.items():
            self.rejects.keys.add(shape, count)
        return texts

    def _parse_line(self, number: int, line: bytes | None) -> bytes | None:
        options = self.options
        if line is None:
            self.reject_at(number, f"the line {options.too_large}")
            return None
        line = line.removesuffix(b"\n")
        if number == 1 and self.part.begin == 0:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.strip():
            return None
        content: bytes | None = None
        try:
            tree = loads(line)
        except UnicodeDecodeError as error:
            why = not_utf8(line, error.reason)
        except ValueError as error:
            why = f"not JSON ({error})"
        else:
            content, why = self._document_in(tree)
        if content is None:
            self.reject_at(number, why)
        elif not self.is_kept(content, tree, self._where(number)):
            return None
        return content

    def _document_in(self, tree: Any) -> tuple[bytes | None, str]:
        """Return the document in a parsed row, or None and the reason; count its keys."""
        options = self.options
        if isinstance(tree, dict):
            self.rejects.keys.add(tree)
        return document_in(tree, options.text_keys, options.conversations, options.ignored_keys)

    def _where(self, number: int) -> str:
        after = f" after byte {self.part.begin}" if self.part.begin else ""
        return f"{self.part.source.path}:{number}{after}"


class JsonReader(JsonLinesReader):
    """Reader of a .json file: a list of objects, one object, or one object per line."""

    kind = "json"
    suffixes = (".json",)
    folder_suffixes = ()
    _is_list = False

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        """Return the keys of a list's first object, or of the first line's object."""
        with open_stream(source, xxhash.xxh3_64(), to_end=False) as stream:
            head = next(stream_chunks(stream, HEAD_BYTES), b"")
        text = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").lstrip(" \t\r\n[")
        try:
            tree, _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return ()
        return list(tree) if isinstance(tree, dict) else ()

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        return [unsplit(source)]

    def reject_at(self, place: int, why: str) -> None:
        """Reject an item. `place`: index of the object in a list, from 0, or line, from 1."""
        where = {"row": place} if self._is_list else {"line": place}
        self.rejects.add(BadDocument(self.part.source.path, why, **where))

    def _blocks(self) -> Iterator[list[bytes]]:
        with open_stream(self.part.source, self) as stream:
            chunks = stream_chunks(stream)
            head = b""
            for chunk in chunks:  # up to the first non-empty line
                head += chunk
                if b"\n" in head.removeprefix(BYTE_ORDER_MARK).lstrip():
                    break
            start = without_mark(head, self.part.source.path).lstrip()
            if not start.startswith(b"[") and _is_json(start.partition(b"\n")[0]):
                yield from self._parsed(chain([head], chunks))
            elif start:
                self._is_list = True
                yield from self._list(head, chunks)

    def _list(self, head: bytes, chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
        path, parts, size = self.part.source.path, [head], len(head)
        for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_LIST_BYTES:
                raise DataError(
                    f"{path} is one JSON value of more than {MAX_LIST_BYTES:,} bytes, which is "
                    "read at once -> write its objects one per line, as .jsonl"
                )
        parsed = _parsed(path, b"".join(parts).removeprefix(BYTE_ORDER_MARK))
        rows = parsed if isinstance(parsed, list) else [parsed]
        for begin in range(0, len(rows), ROWS_PER_BLOCK):
            self.places = []
            yield [
                content
                for number, row in enumerate(rows[begin : begin + ROWS_PER_BLOCK], begin)
                if (content := self._row(number, row)) is not None
            ]

    def _row(self, number: int, row: Any) -> bytes | None:
        options = self.options
        content, why = self._document_in(row)
        if content is not None and len(content) > options.max_document_bytes:
            content, why = None, f"the document {options.too_large}"
        if content is None:
            self.reject_at(number, why)
        elif not self.is_kept(content, row, f"{self.part.source.path} row {number}"):
            return None
        else:
            self.places.append(number)
        return content


def first_lines(source: Source, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, without its byte order mark, skipping too long ones."""
    with open_stream(source, xxhash.xxh3_64(), to_end=False) as stream:
        lines = chain.from_iterable(split_lines(stream_chunks(stream), max_bytes))
        for number, line in enumerate(lines):
            if line is not None:
                yield line if number else line.removeprefix(BYTE_ORDER_MARK)


def _text_in(row: dict[str, Any], keys: Sequence[str]) -> bytes:
    """Return the text of a row. Raise LookupError if it has none."""
    content, why = text_of([value_at(row, key) for key in keys], keys)
    if content is None:
        raise LookupError(why)
    return content


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except ValueError:
        return False
    return True


def _parsed(path: str, content: bytes) -> Any:
    """Parse a file. Raise DataError with the line of invalid JSON."""
    try:
        return loads(content)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno} cannot be read as JSON: {error.msg}") from error
    except ValueError as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error


READERS = (TextReader, JsonLinesReader, JsonReader)
