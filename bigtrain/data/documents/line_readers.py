"""Documents of text files, each of which is one, and of files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO

import orjson

from bigtrain.data.documents.bad_documents import BadDocument
from bigtrain.data.documents.fields import document_in, text_in
from bigtrain.data.documents.reader import PartReader
from bigtrain.data.sources.files import open_file, open_stream, stream_bytes
from bigtrain.data.sources.lines import count_lines_before, range_chunks, split_lines, stream_chunks


class TextReader(PartReader):
    """A file that is one document, as it stands."""

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
        content = b"".join(parts)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            self.rejects.add(BadDocument(source.path, f"not UTF-8 ({error.reason})", line=line))
        else:
            yield [content]


class JsonLinesReader(PartReader):
    """A JSON object in each line of a file, or of a range of its bytes."""

    def reject_at(self, place: int, why: str) -> None:
        """`place` counts from the beginning of the part; an error names the line of the file."""
        if not self.rejects.allowed and self.part.begin:
            place += count_lines_before(self.part.source.path, self.part.begin)
        self.rejects.add(BadDocument(self.part.source.path, why, line=place))

    def _blocks(self) -> Iterator[list[bytes]]:
        source = self.part.source
        if self.part.end is None:
            with open_stream(source, self) as stream:
                yield from self._parsed(stream_chunks(stream))
            return
        with open_file(source) as file:
            yield from self._parsed(self._range_chunks(file, self.part.end))

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
            return [text_in(orjson.loads(line), keys) for line in lines]  # type: ignore[arg-type]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            parsed = (self._parse_line(n, line) for n, line in enumerate(lines, self.num_lines + 1))
            return [content for content in parsed if content is not None]

    def _parse_line(self, number: int, line: bytes | None) -> bytes | None:
        options = self.options
        if line is None:
            self.reject_at(number, f"the line {options.too_large}")
            return None
        line = line.removesuffix(b"\n")
        if number == 1 and self.part.begin == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            return None
        content: bytes | None = None
        try:
            # orjson is several times quicker and refuses more: numbers beyond 64 bits, for one.
            tree = orjson.loads(line) if options.chat else json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            why = f"not UTF-8 ({error.reason})"
        except (ValueError, RecursionError) as error:
            why = f"not JSON ({error})"
        else:
            content, why = document_in(tree, options.text_keys, options.conversations)
        if content is None:
            self.reject_at(number, why)
        return content
