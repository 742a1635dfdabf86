"""Readers of tables: csv, parquet, arrow and Hugging Face datasets, one document per row."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from bigtrain.data.documents.bad_documents import BadDocument
from bigtrain.data.documents.fields import conversation_of, text_of
from bigtrain.data.documents.reader import PartReader, ReadOptions
from bigtrain.data.documents.table_rows import (
    Block,
    TextColumn,
    arrow_rows,
    csv_rows,
    dataset_rows,
    parquet_rows,
)
from bigtrain.data.sources.files import (
    open_stream,
    open_table,
    require_unchanged,
    stream_chunks,
    unpacked,
)


class CsvReader(PartReader):
    """Reader of comma- or tab-separated rows; its checksum covers the file's bytes."""

    def reject_at(self, place: int, why: str) -> None:
        self.rejects.add(BadDocument(self.part.source.path, why, line=place))

    def _blocks(self) -> Iterator[list[bytes]]:
        options, source = self.options, self.part.source
        with open_stream(source, self) as stream:
            chunks = stream_chunks(stream)
            limit = options.max_document_bytes
            for line, values in csv_rows(source, options.keys, chunks, limit, self.rejects):
                content, why = _document(values, options)
                if content is None:
                    self.reject_at(line, why)
                else:
                    self.places = [line]
                    yield [content]


class TableReader(PartReader):
    """Reader of rows of parquet, arrow or a dataset."""

    def scan_layout(self) -> None:
        """Read all documents, which their checksum requires; see `PartReader`."""
        if not self.part.source.is_hashed_by_documents:
            super().scan_layout()
            return
        for _ in self.blocks():
            pass

    def _blocks(self) -> Iterator[list[bytes]]:
        source, scratch = self.part.source, self.options.scratch
        if source.needs_decompression:
            assert scratch is not None, "ReadOptions.scratch is for this source"
            with unpacked(source, self._hash, scratch) as file:
                yield from self._table(file)
            return
        require_unchanged(source)
        yield from self._table(None if source.address is None else open_table(source))
        require_unchanged(source)

    def _table(self, file: Any = None) -> Iterator[list[bytes]]:
        hashed = self.part.source.is_hashed_by_documents
        for block in self._rows(file):
            self.bytes_done = int(self.part.num_bytes * block.done)
            self.places = []
            sizes = array("q")
            joined = None
            # Whether `_contents` would accept every row unchanged.
            if (
                isinstance(block.values, TextColumn)
                and not self.options.chat
                and max(map(len, block.values.contents), default=0)
                <= self.options.max_document_bytes
            ):
                contents, joined = block.values.contents, block.values.joined
                sizes.extend(map(len, contents))
            else:
                contents = list(self._contents(block, sizes))
            if hashed:
                # Row by row, so that it does not depend on the number read together.
                self._hash.update(b"".join(contents) if joined is None else joined)
                self._layout.update(sizes.tobytes())
            yield contents

    def _rows(self, file: Any) -> Iterator[Block]:
        part, keys = self.part, self.options.keys
        source = part.source
        if source.kind in ("parquet", "arrow"):
            read = parquet_rows if source.kind == "parquet" else arrow_rows
            return read(source.path, keys, part.begin, part.end, file)
        return dataset_rows(source, self.options.selection, keys, part.begin, part.end)

    def _contents(self, block: Block, sizes: array[int]) -> Iterator[bytes]:
        """Yield the rows that are documents. Append the size of each to `sizes`, and for others the
        reason as a negative number."""
        values = block.values
        rows = values.rows() if isinstance(values, TextColumn) else values
        for row, columns in enumerate(rows, block.row):
            content, why = _document(columns, self.options)
            if content is None:
                sizes.append(-1 - xxhash.xxh32_intdigest(why.encode()))
                self.reject_at(row, why)
                continue
            sizes.append(len(content))
            self.places.append(row)
            yield content


def without_missing(value: Any) -> Any:
    """Return `value` without the None-valued keys of objects: a struct column has every key of any
    row in all rows, so that a tool would have the parameters of all others."""
    if isinstance(value, dict):
        return {key: without_missing(item) for key, item in value.items() if item is not None}
    return [without_missing(item) for item in value] if isinstance(value, list) else value


def _document(values: Sequence[Any], options: ReadOptions) -> tuple[bytes | None, str]:
    """Return the document of a row, or None and the reason."""
    if options.conversations is not None:
        # A single text column is read without the others.
        given = [*values, *(None for _ in options.conversations.columns[len(values) :])]
        content, why = conversation_of(without_missing(given), options.conversations)
    else:
        content, why = text_of(values, options.text_keys)
    if content is not None and len(content) > options.max_document_bytes:
        return None, f"the document {options.too_large}"
    return content, why
