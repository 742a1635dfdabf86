"""Readers of tables: parquet and arrow, one document per row.

Raises DataError for corrupt files and for files without any of the columns.
"""

from __future__ import annotations

import mmap
import os
from abc import abstractmethod
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import xxhash

from bigtrain.data.documents.chat_formats import conversation_of, text_of
from bigtrain.data.documents.files import Source, open_table, require_unchanged, unpacked
from bigtrain.data.documents.json_columns import Decoder, decoders_of, features_of, without_missing
from bigtrain.data.documents.key_rules import names_in
from bigtrain.data.documents.reader import (
    PartReader,
    ReadOptions,
    RejectedDocuments,
    SourcePart,
    even_parts,
    unsplit,
)
from bigtrain.data.documents.row_format import Extracted
from bigtrain.data.documents.table_rows import (
    RowBlock,
    TextColumn,
    aligned,
    bytes_of_columns,
    columns_of,
    require_sound,
    rows_of_batch,
    rows_per_read,
    stored_columns,
)
from bigtrain.errors import DataError, first_line
from bigtrain.system.storage.remote_file import RemoteFile


class RowReader(PartReader):
    """Base of the readers of tables. columns: columns that are read of the current file."""

    def __init__(self, part: SourcePart, options: ReadOptions, rejects: RejectedDocuments) -> None:
        super().__init__(part, options, rejects)
        self.columns: list[str] = []
        self._named_columns: list[str] = []  # the columns for which `_names` were computed
        self._names: list[str | None] = []

    def _row(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return a row of `columns` as a dictionary."""
        # The names change with the columns: a reader may set `columns` for each batch.
        if self._named_columns is not self.columns:
            keys = self.options.keys
            # A reader that does not set its columns has all primary columns.
            self._named_columns = self.columns
            self._names = aligned(self.columns or keys.primary, keys)
        pairs = zip(self._names, values, strict=False)
        return {name: value for name, value in pairs if name is not None}

    def _document(self, row: dict[str, Any]) -> Extracted:
        """Return the document of a row."""
        options = self.options
        if options.conversations is not None:
            document = conversation_of(without_missing(row), options.conversations)
        elif problem := options.key_rules.problem(row, {}):
            document = Extracted(None, problem)
        else:
            texts = [row[key] for key in options.text_keys if key in row]
            document = text_of(texts, options.text_keys)
        if document.content is not None and len(document.content) > options.max_document_bytes:
            return Extracted(None, f"the document {options.too_large}")
        return document


class TableReader(RowReader):
    """Base of the readers of rows of parquet, arrow and datasets."""

    hashes_documents = True

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
            assert scratch is not None, "a compressed table needs ReadOptions.scratch"
            with unpacked(source, self._hash, scratch) as file:
                yield from self._table(file)
            return
        require_unchanged(source)  # `unpacked` checks this itself
        remote_file = None if source.address is None else open_table(source)
        yield from self._table(remote_file)  # None: the source's local file
        require_unchanged(source)

    def _table(self, file: Any) -> Iterator[list[bytes]]:
        """Yield the documents of the rows; hash documents and layout. `file` as in `_rows`."""
        is_hashed = self.part.source.is_hashed_by_documents
        for block in self._rows(file):
            self.bytes_done = int(self.part.num_bytes * block.share_done)
            self.places = []
            # By row: bytes of the document, or a negative number for a row without one.
            sizes = array("q")
            joined = None
            # Texts that need no check, of a size that is allowed: `_contents` would return them
            # unchanged, and more slowly.
            if (
                isinstance(block.values, TextColumn)
                and not self.options.chat
                and self.options.text_filter is None
                and max(map(len, block.values.contents), default=0)
                <= self.options.max_document_bytes
            ):
                contents, joined = block.values.contents, block.values.joined
                sizes.extend(map(len, contents))
            else:
                contents = list(self._contents(block, sizes))
            if is_hashed:
                # Hashes of a stream do not depend on the number of rows that are read together.
                self._hash.update(b"".join(contents) if joined is None else joined)
                self._layout.update(sizes.tobytes())
            yield contents

    @abstractmethod
    def _rows(self, file: Any) -> Iterator[RowBlock]:
        """Yield the rows of the part. `file`: opened instead of the source's path, or None."""

    def _contents(self, block: RowBlock, sizes: array[int]) -> Iterator[bytes]:
        """Yield the rows that are documents. Append the size of every document to `sizes`, and for
        other rows the reason as a negative number."""
        values = block.values
        rows = values.rows() if isinstance(values, TextColumn) else values
        for number, row_values in enumerate(rows, block.row):
            row = self._row(row_values)
            content, reason = self._document(row)
            if content is None:
                sizes.append(-1 - xxhash.xxh32_intdigest(reason.encode()))
                self.reject_at(number, reason)
                continue
            if not self.is_kept(content, row, f"{self.part.source.path} row {number}"):
                sizes.append(-1)
                continue
            sizes.append(len(content))
            self.places.append(number)
            yield content


class ParquetReader(TableReader):
    """Reader of row groups of a parquet file."""

    format_name = "parquet"
    suffixes = folder_suffixes = (".parquet",)
    random_access = True

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        from pyarrow import parquet

        with _reading(source.path):
            return list(parquet.read_schema(open_table(source)).names)

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        """Return parts of row groups, assuming that bytes are spread evenly over rows."""
        from pyarrow import parquet

        with _reading(source.path):
            metadata = parquet.read_metadata(open_table(source))
        groups = range(metadata.num_row_groups)
        row_ends = list(accumulate(metadata.row_group(group).num_rows for group in groups))
        num_bytes = source.record.bytes or 0
        byte_ends = [num_bytes * row_end // max(1, row_ends[-1]) for row_end in row_ends]
        parts: list[SourcePart] = []
        begin = bytes_assigned = 0
        for group in groups:
            # A part ends with the last group, or before a group that would make it too large.
            if group == groups[-1] or byte_ends[group + 1] - bytes_assigned > shard_bytes:
                part_bytes = byte_ends[group] - bytes_assigned
                parts.append(SourcePart(source, begin, group + 1, part_bytes))
                begin, bytes_assigned = group + 1, byte_ends[group]
        return parts or [unsplit(source)]

    def _rows(self, file: Any) -> Iterator[RowBlock]:
        from pyarrow import parquet

        path, keys, begin = self.part.source.path, self.options.keys, self.part.begin
        # Buffering before reading holds all row groups in memory until the end.
        opened = path if file is None else file
        with _reading(path), parquet.ParquetFile(opened, pre_buffer=False) as table:
            names, decoders = table.schema_arrow.names, _decoders(table.schema_arrow)
            counted_names = names_in(tree_of(table.schema_arrow), self.options.key_rules.read_keys)
            self.columns = columns = columns_of(path, keys, names)
            stored = stored_columns(columns, names)
            group_rows = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
            row = first_row = sum(group_rows[:begin])
            end = len(group_rows) if self.part.end is None else self.part.end
            num_rows = sum(group_rows[begin:end])
            for group in range(begin, end):
                num_bytes = bytes_of_columns(table.metadata.row_group(group), stored)
                rows_at_once = rows_per_read(num_bytes, group_rows[group])
                for batch in table.iter_batches(rows_at_once, row_groups=[group], columns=stored):
                    share_done = (row - first_row) / max(1, num_rows)
                    self.rejects.keys.add(counted_names, batch.num_rows)
                    yield RowBlock(row, rows_of_batch(batch, columns, keys, decoders), share_done)
                    row += batch.num_rows


class ArrowReader(TableReader):
    """Reader of record batches of an IPC file or stream; a stream is always read completely."""

    format_name = "arrow"
    suffixes = (".arrow", ".feather")
    random_access = True

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        import pyarrow

        with _reading(source.path), _mapped(open_table(source)) as mapped:
            is_file = _is_ipc_file(mapped)
            opened = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
            return list(opened.schema.names)

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        """Return parts of record batches; one part for a stream, which has no index of batches."""
        import pyarrow

        with _reading(source.path), _mapped(open_table(source)) as mapped:
            is_file = _is_ipc_file(mapped)
            count = int(pyarrow.ipc.open_file(mapped).num_record_batches) if is_file else 0
        return even_parts(source, count, shard_bytes) if count else [unsplit(source)]

    def _rows(self, file: Any) -> Iterator[RowBlock]:
        path, keys = self.part.source.path, self.options.keys
        with _reading(path), _mapped(path if file is None else file) as mapped:
            row = 0
            for batch, share_done in _record_batches(mapped, self.part.begin, self.part.end):
                if share_done is not None:  # a batch of the part
                    self.columns = columns = columns_of(path, keys, batch.schema.names)
                    read_keys = self.options.key_rules.read_keys
                    self.rejects.keys.add(
                        names_in(tree_of(batch.schema), read_keys), batch.num_rows
                    )
                    stored = stored_columns(columns, batch.schema.names)
                    for column in stored:
                        require_sound(batch.column(column))
                    decoders = _decoders(batch.schema)
                    num_bytes = sum(batch.column(column).nbytes for column in stored)
                    rows_at_once = rows_per_read(num_bytes, batch.num_rows)
                    for first in range(0, batch.num_rows, rows_at_once):
                        part = batch.slice(first, rows_at_once)
                        rows = rows_of_batch(part, columns, keys, decoders)
                        yield RowBlock(row + first, rows, share_done)
                row += batch.num_rows


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raise DataError for an error of arrow or of the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error


def tree_of(schema: Any) -> dict[str, Any]:
    """Return the columns of an arrow schema, or the fields of a struct, by name: a tree of names
    for a struct, None for any other type."""
    import pyarrow

    return {
        field.name: tree_of(field.type) if pyarrow.types.is_struct(field.type) else None
        for field in schema
    }


def _decoders(schema: Any) -> dict[str, Decoder]:
    """Return the converters of the columns of an arrow schema that contain JSON."""
    return decoders_of({field.name: field.type for field in schema}, features_of(schema))


def _mapped(opened: Any) -> Any:
    """Return a path, an open file on disk or a remote file in the form that arrow reads."""
    import pyarrow

    if isinstance(opened, str):
        return pyarrow.memory_map(opened)
    if isinstance(opened, RemoteFile):
        return pyarrow.PythonFile(opened, mode="r")
    # Mapping zero bytes fails; arrow's error reports a truncated file.
    size = os.fstat(opened.fileno()).st_size
    mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    return pyarrow.BufferReader(pyarrow.py_buffer(mapped))


def _record_batches(mapped: Any, begin: int, end: int | None) -> Iterator[tuple[Any, float | None]]:
    """Yield every batch before `end`, and the share of the batches from `begin` on that were read
    before; None for a batch before `begin`, of which only the rows are counted."""
    import pyarrow

    if not _is_ipc_file(mapped):
        for batch in pyarrow.ipc.open_stream(mapped):
            yield batch, mapped.tell() / mapped.size()
        return
    reader = pyarrow.ipc.open_file(mapped)
    end = reader.num_record_batches if end is None else end
    for number in range(end):
        share_done = None if number < begin else (number - begin) / (end - begin)
        yield reader.get_batch(number), share_done


def _is_ipc_file(mapped: Any) -> bool:
    magic = mapped.read(6)
    mapped.seek(0)
    return bool(magic == b"ARROW1")
