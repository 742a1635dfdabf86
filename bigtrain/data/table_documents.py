"""Documents of tables: csv, parquet, arrow and Hugging Face datasets, a row each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from bigtrain.data import tables
from bigtrain.data.bad_documents import BadDocument
from bigtrain.data.document_content import conversation_of, text_of
from bigtrain.data.lines import stream_chunks
from bigtrain.data.part_reading import PartReader
from bigtrain.data.parts import ReadOptions
from bigtrain.data.source_files import open_stream, require_unchanged
from bigtrain.data.tables import Rows, arrow_rows, csv_rows, dataset_rows, parquet_rows
from bigtrain.data.text_columns import TextColumn

T = TypeVar("T")


class CsvReader(PartReader):
    """A comma-separated file, whose checksum is of its bytes."""

    def reject_at(self, place: int, why: str) -> None:
        """`place` is a line."""
        self.rejects.add(BadDocument(self.part.source.path, why, line=place))

    def _blocks(self) -> Iterator[list[bytes]]:
        options, source = self.options, self.part.source
        with open_stream(source, self._counted()) as stream:
            chunks = stream_chunks(stream)
            limit = options.max_document_bytes
            for line, rows in csv_rows(source.path, options.keys, chunks, limit, self.rejects):
                self.places = []
                contents = []
                for content, why in _documents(rows, options):
                    if content is None:
                        self.reject_at(line, why)
                    else:
                        self.places.append(line)
                        contents.append(content)
                yield contents


class TableReader(PartReader):
    """Rows of parquet, arrow or a dataset, whose checksum is of their documents."""

    def skim(self) -> None:
        """See `PartReader`: there is no checksum without the documents."""
        for _ in self.blocks():
            pass

    def _blocks(self) -> Iterator[list[bytes]]:
        require_unchanged(self.part.source)
        for row, values in self._followed(self._rows()):
            self.places = []
            if isinstance(values, TextColumn) and self._as_it_stands(values):
                self._hash.update(values.joined)
                contents = values.contents
            else:
                rows = values.rows() if isinstance(values, TextColumn) else values
                contents = list(self._contents(row, rows))
            self._layout.update(array("q", [row, *map(len, contents)]).tobytes())
            yield contents
        require_unchanged(self.part.source)

    def _rows(self) -> Iterator[tuple[int, Rows | TextColumn]]:
        part, keys = self.part, self.options.keys
        source = part.source
        if source.kind == "parquet":
            return parquet_rows(source.path, keys, part.begin, part.end)
        if source.kind == "arrow":
            return arrow_rows(source.path, keys, part.begin, part.end)
        return dataset_rows(source, self.options.selection, keys, part.begin, part.end)

    def _as_it_stands(self, column: TextColumn) -> bool:
        """Whether `_contents` would take every row, and as it is."""
        limit = self.options.max_document_bytes
        return not self.options.chat and max(map(len, column.contents), default=0) <= limit

    def _contents(self, first: int, rows: Sequence[Sequence[Any]]) -> Iterator[bytes]:
        """The rows that are documents, of which the first is row number `first`."""
        for row, (content, why) in enumerate(_documents(rows, self.options), first):
            if content is None:
                self._layout.update(f"{row} {why}".encode())
                self.reject_at(row, why)
                continue
            self.places.append(row)
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


def _documents(
    rows: Sequence[Sequence[Any]], options: ReadOptions
) -> Iterator[tuple[bytes | None, str]]:
    """The document of each row, or None and why there is none."""
    for values in rows:
        if options.chat:
            content, why = conversation_of(values, options.text_keys[0])
        else:
            content, why = text_of(values, options.text_keys)
        if content is not None and len(content) > options.max_document_bytes:
            content, why = None, f"the document {options.too_large}"
        yield content, why
