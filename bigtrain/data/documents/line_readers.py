"""Readers of text files, one document each, and of JSON files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

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
from bigtrain.data.documents.key_rules import names_in
from bigtrain.data.documents.reader import (
    BadDocument,
    PartReader,
    ReadOptions,
    SourcePart,
    even_parts,
    unsplit,
)
from bigtrain.data.documents.row_format import Extracted
from bigtrain.errors import DataError

MAX_LIST_BYTES = 1 << 31
"""Limit of a .json file that is one list, which is parsed at once."""
HEAD_BYTES = 1 << 20
"""Bytes read for the first object of a .json file, which may be one line."""
ROWS_PER_BLOCK = 1024


class TextReader(PartReader):
    """Reader of a file that is one document, unmodified but for a byte order mark."""

    format_name = "text"
    suffixes = folder_suffixes = (".txt",)
    has_rows = False

    def _blocks(self) -> Iterator[list[bytes]]:
        source, limit = self.part.source, self.options.max_document_bytes
        chunks: list[bytes] = []
        num_bytes = 0
        with open_stream(source, self) as stream:
            for chunk in stream_chunks(stream, stream_bytes(source)):
                num_bytes += len(chunk)
                if num_bytes > limit:
                    reason = f"the document {self.options.too_large}"
                    self.rejects.add(BadDocument(source.path, reason))
                    return
                chunks.append(chunk)
        content = b"".join(chunks).removeprefix(BYTE_ORDER_MARK)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            reason = not_utf8(content, error.reason)
            self.rejects.add(BadDocument(source.path, reason, line=line))
        else:
            if self.is_kept(content, {}, source.path):
                yield [content]


class JsonLinesReader(PartReader):
    """Reader of a file, or of a byte range of a file, with one JSON object per line."""

    format_name = "jsonl"
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
                return tree if isinstance(tree, dict) else ()
        return ()

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        if source.compressed or source.record.bytes is None:
            return [unsplit(source)]
        return even_parts(source, source.record.bytes, shard_bytes)

    def reject_at(self, position: int, reason: str) -> None:
        """Reject the line at `position` in the part; an error names the line of the file."""
        if not self.rejects.allowed and self.part.begin:
            with open_file(self.part.source, self.part.begin) as file:
                position += count_lines_before(file, self.part.begin)
        self.rejects.add(BadDocument(self.part.source.path, reason, line=position))

    def _blocks(self) -> Iterator[list[bytes]]:
        part = self.part
        if part.end is None:
            with open_stream(part.source, self) as stream:
                yield from self._parsed(stream_chunks(stream))
            return
        with open_file(part.source, part.end) as file:
            yield from self._parsed(range_chunks(file, part.begin, part.end, self, self._layout))

    def _hash_part(self) -> None:
        part = self.part
        if part.end is None:
            super()._hash_part()
            return
        with open_file(part.source, part.end) as file:
            for _ in range_chunks(file, part.begin, part.end, self, self._layout):
                pass

    def _parsed(self, chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
        """Yield the documents in the lines of `chunks`, in a list per chunk."""
        is_only_text = not self.options.chat and self.options.text_filter is None
        for lines in split_lines(chunks, self.options.max_document_bytes):
            documents = self._texts_at_once(lines) if is_only_text else None
            if documents is None:  # line by line
                documents, self.places = [], []
                for number, line in enumerate(lines, self.num_lines + 1):
                    content = self._parse_line(number, line)
                    if content is not None:
                        documents.append(content)
                        self.places.append(number)
            yield documents
            self.num_lines += len(lines)

    def _texts_at_once(self, lines: Sequence[bytes | None]) -> list[bytes] | None:
        """Return the texts of `lines`, several times faster than line by line; None if a line may
        not be a text, has a key that may be refused, or has texts below other keys."""
        keys, refused = self.options.text_keys, self.options.key_rules.refused.keys()
        if any("." in key for key in keys):
            return None
        try:
            rows: list[dict[str, Any]] = [orjson.loads(line) for line in lines]  # type: ignore[arg-type]
            shapes = Counter(map(tuple, rows))  # number of rows by their keys
            if any(not refused.isdisjoint(shape) for shape in shapes):
                return None
            if len(keys) == 1:
                texts = [row[keys[0]].encode() for row in rows]
            else:
                texts = []
                for row in rows:
                    content, _ = text_of([value_at(row, key) for key in keys], keys)
                    if content is None:
                        return None
                    texts.append(content)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        # orjson drops one of two equal keys of a row, which then has fewer keys than the line has
        # quoted keys: parsed by itself, the line raises an error.
        for key in keys:
            quoted_key = f'"{key}"'.encode()
            num_quoted = sum(line.count(quoted_key) for line in lines if line)
            num_rows = sum(count for shape, count in shapes.items() if key in shape)
            if num_quoted != num_rows:
                return None
        for shape, count in shapes.items():
            self.rejects.keys.add(shape, count)
        return texts

    def _parse_line(self, number: int, line: bytes | None) -> bytes | None:
        """Return the document in a line; None if it is blank, rejected or dropped by the filter."""
        if line is None:
            self.reject_at(number, f"the line {self.options.too_large}")
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
            reason = not_utf8(line, error.reason)
        except ValueError as error:
            reason = f"not JSON ({error})"
        else:
            content, reason = self._document_in(tree)
        if content is None:
            self.reject_at(number, reason)
            return None
        offset = f" after byte {self.part.begin}" if self.part.begin else ""
        location = f"{self.part.source.path}:{number}{offset}"
        return content if self.is_kept(content, tree, location) else None

    def _document_in(self, tree: Any) -> Extracted:
        """Return the document in a parsed row; count the keys of the row."""
        options = self.options
        if isinstance(tree, dict):
            self.rejects.keys.add(names_in(tree, options.key_rules.read_keys))
        return document_in(tree, options.text_keys, options.conversations, options.ignored_keys)


class JsonReader(JsonLinesReader):
    """Reader of a .json file: a list of objects, one object, or one object per line."""

    format_name = "json"
    suffixes = (".json",)
    folder_suffixes = ()
    _is_list = False

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        """Return the first object of a list, or of the first line."""
        with open_stream(source, xxhash.xxh3_64(), to_end=False) as stream:
            head = next(stream_chunks(stream, HEAD_BYTES), b"")
        text = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").lstrip()
        try:
            tree, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
        except ValueError:
            return ()
        return tree if isinstance(tree, dict) else ()

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        return [unsplit(source)]

    def reject_at(self, position: int, reason: str) -> None:
        """Reject an item. `position`: index of the object in a list, from 0, or line, from 1."""
        path = self.part.source.path
        if self._is_list:
            self.rejects.add(BadDocument(path, reason, row=position))
        else:
            self.rejects.add(BadDocument(path, reason, line=position))

    def _blocks(self) -> Iterator[list[bytes]]:
        with open_stream(self.part.source, self) as stream:
            chunks = stream_chunks(stream)
            head = b""
            for chunk in chunks:  # up to the first non-empty line
                head += chunk
                if b"\n" in head.removeprefix(BYTE_ORDER_MARK).lstrip():
                    break
            start = without_mark(head, self.part.source.path).lstrip()
            # A first line that is JSON, and not a list, is the first of several objects.
            has_lines = not start.startswith(b"[")
            if has_lines:
                try:
                    orjson.loads(start.partition(b"\n")[0])
                except ValueError:
                    has_lines = False
            if has_lines:
                yield from self._parsed(chain([head], chunks))
            elif start:
                self._is_list = True
                yield from self._list(head, chunks)

    def _list(self, head: bytes, chunks: Iterator[bytes]) -> Iterator[list[bytes]]:
        """Yield the documents of a file that is one JSON value, in blocks of rows."""
        # A list can only be parsed when it is complete.
        path, parts, num_bytes = self.part.source.path, [head], len(head)
        for chunk in chunks:
            parts.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > MAX_LIST_BYTES:
                raise DataError(
                    f"{path} is one JSON value of more than {MAX_LIST_BYTES:,} bytes, which is "
                    "read at once -> write its objects one per line, as .jsonl"
                )
        try:
            parsed = loads(b"".join(parts).removeprefix(BYTE_ORDER_MARK))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno} cannot be read as JSON: {error.msg}") from error
        except ValueError as error:
            raise DataError(f"{path} cannot be read as JSON: {error}") from error

        # The objects, in blocks: a document may be large.
        rows = parsed if isinstance(parsed, list) else [parsed]
        for begin in range(0, len(rows), ROWS_PER_BLOCK):
            documents: list[bytes] = []
            self.places = []
            for number, row in enumerate(rows[begin : begin + ROWS_PER_BLOCK], begin):
                content, reason = self._document_in(row)
                if content is not None and len(content) > self.options.max_document_bytes:
                    content, reason = None, f"the document {self.options.too_large}"
                if content is None:
                    self.reject_at(number, reason)
                elif self.is_kept(content, row, f"{path} row {number}"):
                    documents.append(content)
                    self.places.append(number)
            yield documents


def first_lines(source: Source, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, without its byte order mark, skipping too long ones."""
    with open_stream(source, xxhash.xxh3_64(), to_end=False) as stream:
        lines = chain.from_iterable(split_lines(stream_chunks(stream), max_bytes))
        for number, line in enumerate(lines):
            if line is not None:
                yield line if number else line.removeprefix(BYTE_ORDER_MARK)
