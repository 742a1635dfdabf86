"""Readers of tables: csv, parquet, arrow and Hugging Face datasets, one document per row.

Raises DataError for corrupt files and for files without any of the columns.
"""

from __future__ import annotations

import csv
import mmap
import os
from abc import abstractmethod
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import xxhash

from bigtrain.data.documents.chat_formats import conversation_of, text_of
from bigtrain.data.documents.files import (
    Source,
    open_stream,
    open_table,
    require_unchanged,
    split_lines,
    stream_chunks,
    unpacked,
    without_compression,
    without_mark,
)
from bigtrain.data.documents.json_columns import (
    Decoder,
    decoders_of,
    features_of,
    without_missing,
)
from bigtrain.data.documents.line_readers import first_lines
from bigtrain.data.documents.reader import (
    BadDocument,
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
    decoded,
    joined_rows,
    require_sound,
    rows_of_batch,
    rows_per_read,
    stored_columns,
)
from bigtrain.errors import DataError, first_line
from bigtrain.system.storage.remote_file import RemoteFile

STREAMED_ROWS_PER_READ = 32
"""Rows read at a time from a dataset of unknown size."""


class RowReader(PartReader):
    """Base of the readers of tables. columns: columns that are read of the current file."""

    def __init__(self, part: SourcePart, options: ReadOptions, rejects: RejectedDocuments) -> None:
        super().__init__(part, options, rejects)
        self.columns: list[str] = []
        self._aligned: tuple[list[str], list[str | None]] = ([], [])

    def _row(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return a row of `columns` as a dictionary."""
        if self._aligned[0] is not self.columns or not self.columns:
            keys = self.options.keys
            # A reader that does not set its columns has all that are wanted.
            self._aligned = (self.columns, aligned(self.columns or keys.primary, keys))
        pairs = zip(self._aligned[1], values, strict=False)
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


class CsvReader(RowReader):
    """Reader of comma-separated rows with a header by RFC 4180; of a ``.tsv`` with tabs instead. A
    row whose length differs from the header's is rejected. Errors that make the following rows
    ambiguous (a wrong quote, a field of more than `max_document_bytes` characters) raise DataError
    in any case. Bytes that are not UTF-8 become surrogates."""

    format_name = "csv"
    suffixes = (".csv", ".tsv")

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        lines = (line.decode("utf-8") for line in first_lines(source, options.max_document_bytes))
        try:
            return next(csv.reader(lines, **_dialect(source, options)), ())
        except (csv.Error, UnicodeDecodeError):
            return ()

    def reject_at(self, position: int, reason: str) -> None:
        self.rejects.add(BadDocument(self.part.source.path, reason, line=position))

    def _blocks(self) -> Iterator[list[bytes]]:
        with open_stream(self.part.source, self) as stream:
            for line, values in self._rows(stream_chunks(stream)):
                row = self._row(values)
                content, reason = self._document(row)
                if content is None:
                    self.reject_at(line, reason)
                elif self.is_kept(content, row, f"{self.part.source.path}:{line}"):
                    self.places = [line]
                    yield [content]

    def _rows(self, chunks: Iterator[bytes]) -> Iterator[tuple[int, list[str | None]]]:
        """Yield each row with the number of the line in which it begins."""
        path, keys, num_rows = self.part.source.path, self.options.keys, 0
        # The limit is of the process: the module has no other.
        previous_limit = csv.field_size_limit(self.options.max_document_bytes)
        reader = csv.reader(self._lines(chunks), **_dialect(self.part.source, self.options))
        line, names = 1, []
        try:
            # The header decides the columns to read, and the length of a row.
            names = next(reader, [])
            self.columns = [name for name in columns_of(path, keys, names) if name in names]
            fields_read = [
                None if name is None else names.index(name) for name in aligned(self.columns, keys)
            ]
            line = reader.line_num + 1
            for fields in reader:
                if len(fields) == len(names):
                    num_rows += 1
                    yield line, [None if n is None else fields[n] for n in fields_read]
                elif fields:
                    self.reject_at(line, f"{len(fields)} fields, the header has {len(names)}")
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{path}:{line} cannot be read as csv: {error} -> fix it; or, if a quote is a "
                "letter of the text: --quotes letter"
            ) from error
        finally:
            self.rejects.keys.add(names, num_rows)
            csv.field_size_limit(previous_limit)

    def _lines(self, chunks: Iterator[bytes]) -> Iterator[str]:
        """Yield the lines. Raise DataError for a quote in a ``.tsv`` that may quote, as pandas and
        Excel write it, or be a letter, as in the registered type text/tab-separated-values: with
        either meaning the line has as many fields as the header, whose names are not quoted."""
        path, number, num_tabs = self.part.source.path, 0, -1
        has_doubtful_quotes = self.options.quotes is None and _is_tsv(self.part.source)
        for lines in split_lines(chunks, self.options.max_document_bytes):
            for line in lines:
                number += 1
                if line is None:
                    raise DataError(
                        f"{path}:{number} cannot be read as csv: the line {self.options.too_large}"
                    )
                if number == 1:
                    line = without_mark(line, path)
                if has_doubtful_quotes:
                    has_quote = line.startswith(b'"') or b'\t"' in line
                    if number == 1:
                        num_tabs = -1 if has_quote else line.count(b"\t")
                    elif has_quote and line.count(b"\t") == num_tabs:
                        raise DataError(
                            f"{path}:{number} has a field that begins with a quote, which may "
                            "quote the field, as pandas and Excel write it, or be a letter of the "
                            "text -> --quotes quote, or --quotes letter"
                        )
                yield line.decode("utf-8", "surrogateescape")


def _is_tsv(source: Source) -> bool:
    return without_compression(source.file_name).lower().endswith(".tsv")


def _dialect(source: Source, options: ReadOptions) -> dict[str, Any]:
    """Return the options of `csv.reader` for a file."""
    delimiter = "\t" if _is_tsv(source) else ","
    if options.quotes == "letter":
        return {"delimiter": delimiter, "quoting": csv.QUOTE_NONE, "strict": True}
    return {"delimiter": delimiter, "strict": True}


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
            assert scratch is not None, "ReadOptions.scratch is for this source"
            with unpacked(source, self._hash, scratch) as file:
                yield from self._table(file)
            return
        require_unchanged(source)
        yield from self._table(None if source.address is None else open_table(source))
        require_unchanged(source)

    def _table(self, file: Any = None) -> Iterator[list[bytes]]:
        is_hashed = self.part.source.is_hashed_by_documents
        for block in self._rows(file):
            self.bytes_done = int(self.part.num_bytes * block.share_done)
            self.places = []
            sizes = array("q")
            joined = None
            # `_contents` would accept every text unchanged, and more slowly.
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
                # Row by row, so that it does not depend on the number read together.
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
        for number, columns in enumerate(rows, block.row):
            row = self._row(columns)
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
        ends = list(
            accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        )
        num_bytes = source.record.bytes or 0
        byte_ends = [num_bytes * end // max(1, ends[-1]) for end in ends]
        parts: list[SourcePart] = []
        begin = bytes_assigned = 0
        for group in range(len(ends)):
            if group == len(ends) - 1 or byte_ends[group + 1] - bytes_assigned > shard_bytes:
                parts.append(
                    SourcePart(source, begin, group + 1, byte_ends[group] - bytes_assigned)
                )
                begin, bytes_assigned = group + 1, byte_ends[group]
        return parts or [unsplit(source)]

    def _rows(self, file: Any) -> Iterator[RowBlock]:
        from pyarrow import parquet

        path, keys, begin = self.part.source.path, self.options.keys, self.part.begin
        # Buffering before reading holds all row groups in memory until the end.
        opened = path if file is None else file
        with _reading(path), parquet.ParquetFile(opened, pre_buffer=False) as table:
            names, decoders = table.schema_arrow.names, _decoders(table.schema_arrow)
            self.columns = columns = columns_of(path, keys, names)
            stored = stored_columns(columns, names)
            rows = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
            row = first = sum(rows[:begin])
            count = sum(rows[begin : self.part.end])
            for group in range(begin, len(rows) if self.part.end is None else self.part.end):
                num_bytes = bytes_of_columns(table.metadata.row_group(group), stored)
                rows_at_once = rows_per_read(num_bytes, rows[group])
                for batch in table.iter_batches(rows_at_once, row_groups=[group], columns=stored):
                    share_done = (row - first) / max(1, count)
                    self.rejects.keys.add(names, batch.num_rows)
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
                if share_done is not None:
                    self.columns = columns = columns_of(path, keys, batch.schema.names)
                    self.rejects.keys.add(batch.schema.names, batch.num_rows)
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


class _OpenPart(NamedTuple):
    """Rows of a part of a dataset. first_row: number of the first row in the source; num_rows: 0 if
    unknown."""

    dataset: Any
    first_row: int = 0
    num_rows: int = 0


class DatasetReader(TableReader):
    """Base of the readers of Hugging Face datasets."""

    @classmethod
    @abstractmethod
    def open(cls, source: Source, options: ReadOptions) -> Any:
        """Return the `datasets` object. Raises DataError."""

    @abstractmethod
    def _open_part(self) -> _OpenPart:
        """Return the rows of the part."""

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        dataset = cls.open(source, options)
        if dataset.column_names is not None:
            return list(dataset.column_names)
        return list(next(iter(dataset), ()))

    def _rows(self, file: Any) -> Iterator[RowBlock]:
        path, keys = self.part.source.path, self.options.keys
        dataset, first, count = self._open_part()
        row, all_names = first, dataset.column_names
        if all_names is not None:
            read_columns = columns_of(path, keys, all_names)
            dataset = dataset.select_columns(stored_columns(read_columns, all_names))
        # `datasets` decodes JSON itself, except for features with decode=False.
        features = {} if dataset.features is None else dataset.features.to_dict()
        decoders = decoders_of({}, features, is_text=False)
        rows_at_once = STREAMED_ROWS_PER_READ
        if count:
            rows_at_once = rows_per_read(dataset.data.nbytes, dataset.data.num_rows)
        try:
            for batch in dataset.iter(rows_at_once):
                names = list(batch)
                self.columns = columns = columns_of(path, keys, names)

                def values(name: str, batch: Any = batch) -> Sequence[Any]:
                    return decoded(name, batch[name], decoders)

                rows = joined_rows(len(batch[names[0]]), columns, keys, names, values)
                self.rejects.keys.add(all_names or names, len(rows))
                yield RowBlock(row, rows, (row - first) / count if count else 0.0)
                row += len(rows)
        except (DataError, GeneratorExit):
            raise
        except Exception as error:  # any error of the builder of a foreign format
            raise DataError(
                f"{path} cannot be read after row {row}: {first_line(error)}"
            ) from error


class SavedDatasetReader(DatasetReader):
    """Reader of rows of a directory written by ``save_to_disk``."""

    format_name = "saved_dataset"

    @classmethod
    def open(cls, source: Source, options: ReadOptions) -> Any:
        import datasets

        with _opening(source.path):
            saved = datasets.load_from_disk(source.path)
            is_dict = isinstance(saved, datasets.DatasetDict)
            return saved[options.selection.dataset_split] if is_dict else saved

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        return even_parts(source, len(cls.open(source, options)), shard_bytes)

    def _open_part(self) -> _OpenPart:
        dataset = self.open(self.part.source, self.options).with_format(None)
        if self.part.end is None:
            return _OpenPart(dataset, 0, len(dataset))
        dataset = dataset.select(range(self.part.begin, self.part.end))
        return _OpenPart(dataset, self.part.begin, len(dataset))


class HubDatasetReader(DatasetReader):
    """Reader of shards of a Hub dataset; streamed, to use little memory and disk."""

    format_name = "hub_dataset"

    @classmethod
    def open(cls, source: Source, options: ReadOptions) -> Any:
        import datasets

        with _opening(source.path):
            return datasets.load_dataset(
                source.path,
                options.selection.dataset_config,
                split=options.selection.dataset_split,
                revision=source.record.revision,
                streaming=True,
            )

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        return even_parts(source, cls.open(source, options).num_shards, None)

    def _open_part(self) -> _OpenPart:
        dataset = self.open(self.part.source, self.options)
        if self.part.end is not None:
            assert self.part.end == self.part.begin + 1, "one shard of a streamed dataset at a time"
            dataset = dataset.shard(num_shards=dataset.num_shards, index=self.part.begin)
        return _OpenPart(dataset)


@contextmanager
def _opening(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any error of the builder of a foreign format
        raise DataError(f"--input {path} cannot be opened: {first_line(error)}") from error


@contextmanager
def _reading(path: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error


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
    """Yield every batch before `end`, and how large a share of the batches from `begin` on was read
    before; None for a batch before `begin`, which is only counted."""
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


READERS = (CsvReader, ParquetReader, ArrowReader, SavedDatasetReader, HubDatasetReader)
