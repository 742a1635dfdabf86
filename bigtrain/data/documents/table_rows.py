"""Rows of parquet, arrow, csv and Hugging Face datasets: the values of some columns, in blocks.

A row is the list of its values (None if a column has none). Every function raises DataError for
a corrupt file and for one without any of the columns.

Arrow columns as UTF-8 without a Python string per row, which costs as much as encoding.
"""

from __future__ import annotations

import csv
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bigtrain.data.documents.bad_documents import BadDocument, RejectedDocuments
from bigtrain.data.documents.chat_formats import remedy_for_row
from bigtrain.data.documents.fields import value_at
from bigtrain.data.sources.discovery import Selection, Source, without_compression
from bigtrain.data.sources.files import open_table, split_lines
from bigtrain.errors import DataError, first_line
from bigtrain.system.storage.remote_file import RemoteFile


@dataclass(frozen=True)
class TextColumn:
    """Rows of a text column: `joined` is their concatenation."""

    contents: list[bytes]
    joined: bytes

    def rows(self) -> list[list[str]]:
        return [[content.decode("utf-8")] for content in self.contents]


def require_sound(column: Any) -> None:
    """Raise ArrowInvalid if the arrow array `column` has offsets outside of its buffers.

    A corrupt file can produce one, and reading its rows would crash the process. Text that is not
    UTF-8 is accepted: it is checked per row.
    """
    import pyarrow

    if pyarrow.types.is_string(column.type):
        column.view(pyarrow.binary()).validate(full=True)
    elif pyarrow.types.is_large_string(column.type):
        column.view(pyarrow.large_binary()).validate(full=True)
    else:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise


def text_column(column: Any) -> TextColumn | None:
    """Return the arrow array `column`; None unless every row is text and valid UTF-8."""
    import pyarrow

    kind = column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return None
    offset_type = np.dtype("<i8" if pyarrow.types.is_large_string(kind) else "<i4")
    if column.null_count or not len(column):
        return None
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return None
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(
        offset_buffer, offset_type, len(column) + 1, column.offset * offset_type.itemsize
    )
    first, last = int(offsets[0]), int(offsets[-1])
    joined = data.slice(first, last - first).to_pybytes() if last > first else b""
    ends = (offsets - first).tolist()
    return TextColumn([joined[begin:end] for begin, end in pairwise(ends)], joined)


READ_BYTES = 1 << 21
"""Approximate bytes of rows read at a time, since a document may have many megabytes."""
MAX_ROWS_PER_READ = 4096
STREAMED_ROWS_PER_READ = 32
"""Rows read at a time from a dataset of unknown size."""

Rows = list[list[Any]]


@dataclass(frozen=True)
class Keys:
    """Columns to read. One of `wanted`, which a command's `argument` names, must exist. A row has
    the values of the existing `wanted` ones, then of all `optional` ones, None for missing ones."""

    wanted: Sequence[str]
    optional: Sequence[str] = ()
    argument: str = "--text-key"


@dataclass(frozen=True)
class Block:
    """Rows that were read together, starting with row `row` of the source.

    `done`: share of the part that was read before, for progress; 0.0 if unknown.
    """

    row: int
    values: Rows | TextColumn
    done: float = 0.0


def parquet_rows(
    path: str, keys: Keys, begin: int, end: int | None, opened: Any = None
) -> Iterator[Block]:
    """Yield rows of row groups [begin, end). `opened`: file read instead of `path`, such as
    its decompressed form."""
    from pyarrow import parquet

    with _reading(path):
        # Buffering before reading holds all row groups in memory until the end.
        whole = path if opened is None else opened
        with parquet.ParquetFile(whole, pre_buffer=False) as file:
            columns = _columns(path, keys, file.schema_arrow.names)
            stored = _stored(columns, file.schema_arrow.names)
            rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            row = first = sum(rows[:begin])
            count = sum(rows[begin:end])
            groups = range(begin, len(rows) if end is None else end)
            for group in groups:
                num_bytes = _bytes_of(file.metadata.row_group(group), stored)
                at_once = _rows_per_read(num_bytes, rows[group])
                for batch in file.iter_batches(at_once, row_groups=[group], columns=stored):
                    yield Block(row, _rows_of(batch, columns, keys), (row - first) / max(1, count))
                    row += batch.num_rows


def parquet_columns(source: Source) -> list[str]:
    """Return the columns of a parquet file. Raise DataError if it is corrupt."""
    from pyarrow import parquet

    with _reading(source.path):
        return list(parquet.read_schema(open_table(source)).names)


def arrow_columns(source: Source) -> list[str]:
    """Return the columns of an IPC file or stream. Raise DataError if it is corrupt."""
    import pyarrow

    with _reading(source.path), _mapped(open_table(source)) as mapped:
        is_file = _is_ipc_file(mapped)
        opened = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
        return list(opened.schema.names)


def count_row_groups(source: Source) -> list[int]:
    """Return the rows of every row group of a parquet file. Raise DataError if it is corrupt."""
    from pyarrow import parquet

    with _reading(source.path):
        metadata = parquet.read_metadata(open_table(source))
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def arrow_rows(
    path: str, keys: Keys, begin: int, end: int | None, opened: Any = None
) -> Iterator[Block]:
    """Yield rows of record batches [begin, end) of an IPC file or stream; `opened` as for parquet.

    A stream can only be read completely: with `begin` 0 and no `end`.
    """
    with _reading(path), _mapped(path if opened is None else opened) as mapped:
        row = 0
        for batch, done in _record_batches(mapped, begin, end):
            if done is not None:
                columns = _columns(path, keys, batch.schema.names)
                stored = _stored(columns, batch.schema.names)
                for column in stored:
                    require_sound(batch.column(column))
                num_bytes = sum(batch.column(column).nbytes for column in stored)
                at_once = _rows_per_read(num_bytes, batch.num_rows)
                for first in range(0, batch.num_rows, at_once):
                    part = batch.slice(first, at_once)
                    yield Block(row + first, _rows_of(part, columns, keys), done)
            row += batch.num_rows


def count_record_batches(source: Source) -> int | None:
    """Return the number of record batches of an arrow IPC file; None for a stream, which has no
    index of them."""
    import pyarrow

    with _reading(source.path), _mapped(open_table(source)) as mapped:
        if not _is_ipc_file(mapped):
            return None
        return int(pyarrow.ipc.open_file(mapped).num_record_batches)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error


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
    """Yield each batch up to `end`, and the share of those from `begin` on that is done; None
    before it."""
    import pyarrow

    if not _is_ipc_file(mapped):
        for batch in pyarrow.ipc.open_stream(mapped):
            yield batch, mapped.tell() / mapped.size()
        return
    reader = pyarrow.ipc.open_file(mapped)
    end = reader.num_record_batches if end is None else end
    for number in range(end):
        done = None if number < begin else (number - begin) / (end - begin)
        yield reader.get_batch(number), done


def _is_ipc_file(mapped: Any) -> bool:
    magic = mapped.read(6)
    mapped.seek(0)
    return bool(magic == b"ARROW1")


def csv_rows(
    source: Source, keys: Keys, chunks: Iterator[bytes], max_bytes: int, rejects: RejectedDocuments
) -> Iterator[tuple[int, list[str | None]]]:
    """Yield (line number, its row) of a file with a header by RFC 4180; in a ``.tsv`` with tabs
    instead of commas.

    A row whose length differs from the header's is passed to `rejects`. Errors that make the rest
    of the file ambiguous (a wrong quote, a field of more than `max_bytes` characters) raise
    DataError in any case. Bytes that are not UTF-8 become surrogates.
    """
    previous_limit = csv.field_size_limit(max_bytes)
    path, delimiter = source.path, delimiter_of(source)
    lines = _csv_lines(path, chunks, max_bytes)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    line = 1
    try:
        names = [name.removeprefix("\ufeff") for name in next(reader, [])]
        columns_read = _aligned([c for c in _columns(path, keys, names) if c in names], keys)
        columns = [None if name is None else names.index(name) for name in columns_read]
        line = reader.line_num + 1
        for fields in reader:
            if len(fields) == len(names):
                yield line, [None if c is None else fields[c] for c in columns]
            elif fields:
                why = f"{len(fields)} fields, the header has {len(names)}"
                rejects.add(BadDocument(path, why, line=line))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{line} cannot be read as csv: {error}") from error
    finally:
        csv.field_size_limit(previous_limit)


def delimiter_of(source: Source) -> str:
    """Return the delimiter of a csv, or of a ``.tsv`` by its name."""
    return "\t" if without_compression(source.file_name).lower().endswith(".tsv") else ","


def _csv_lines(path: str, chunks: Iterator[bytes], max_bytes: int) -> Iterator[str]:
    number = 0
    for lines in split_lines(chunks, max_bytes):
        for line in lines:
            number += 1
            if line is None:
                raise DataError(
                    f"{path}:{number} cannot be read as csv: the line is larger than "
                    f"--max-document-bytes {max_bytes:,}"
                )
            yield line.decode("utf-8", "surrogateescape")


def dataset_rows(
    source: Source, selection: Selection, keys: Keys, begin: int, end: int | None
) -> Iterator[Block]:
    """Yield rows [begin, end) of a saved dataset, or shards [begin, end) of a streamed one."""
    dataset = open_hf_dataset(source, selection)
    row = count = 0
    at_once = STREAMED_ROWS_PER_READ
    if source.kind == "saved_dataset":
        dataset = dataset.with_format(None)
        if end is not None:
            dataset, row = dataset.select(range(begin, end)), begin
        count = len(dataset)
    elif source.kind == "hub_dataset" and end is not None:
        assert end == begin + 1, "one shard of a streamed dataset at a time"
        dataset = dataset.shard(num_shards=dataset.num_shards, index=begin)
    if dataset.column_names is not None:
        names = list(dataset.column_names)
        dataset = dataset.select_columns(_stored(_columns(source.path, keys, names), names))
    if source.kind == "saved_dataset":
        at_once = _rows_per_read(dataset.data.nbytes, dataset.data.num_rows)
    try:
        for batch in dataset.iter(at_once):
            columns = _columns(source.path, keys, list(batch))
            names = list(batch)
            rows = _joined(len(batch[names[0]]), columns, keys, names, batch.__getitem__)
            yield Block(row, rows, (row - begin) / count if count else 0.0)
            row += len(rows)
    except (DataError, GeneratorExit):
        raise
    except Exception as error:  # any error of the builder of a foreign format
        raise DataError(
            f"{source.path} cannot be read after row {row}: {first_line(error)}"
        ) from error


def open_hf_dataset(source: Source, selection: Selection) -> Any:
    """Return the source as a `datasets` object; streamed, to use little memory and disk."""
    import datasets

    split, path = selection.dataset_split, source.path
    try:
        if source.kind == "hub_dataset":
            return datasets.load_dataset(
                path,
                selection.dataset_config,
                split=split,
                revision=source.record.revision,
                streaming=True,
            )
        saved = datasets.load_from_disk(path)
        return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    except Exception as error:  # any error of the builder of a foreign format
        raise DataError(f"--input {path} cannot be opened: {first_line(error)}") from error


def _rows_per_read(num_bytes: int, num_rows: int) -> int:
    """Return the number of rows in about `READ_BYTES`, if `num_rows` have `num_bytes`."""
    return max(1, min(MAX_ROWS_PER_READ, READ_BYTES * num_rows // max(1, num_bytes)))


def _bytes_of(row_group: Any, columns: Sequence[str]) -> int:
    """Return the decompressed bytes of the `columns` of a parquet file in its metadata's
    `row_group`."""
    chunks = [row_group.column(number) for number in range(row_group.num_columns)]
    return sum(
        int(chunk.total_uncompressed_size)
        for chunk in chunks
        # A struct column has several: text, messages.list.element.content, ...
        if any(f"{chunk.path_in_schema}.".startswith(f"{column}.") for column in columns)
    )


def _aligned(columns: Sequence[str], keys: Keys) -> list[str | None]:
    """Return `columns`, with None for missing optional ones."""
    wanted = [column for column in columns if column in keys.wanted]
    return [*wanted, *(key if key in columns else None for key in keys.optional)]


def _rows_of(batch: Any, columns: Sequence[str], keys: Keys) -> Rows | TextColumn:
    names = batch.schema.names
    if (
        len(columns) == 1
        and columns[0] in names
        and (texts := text_column(batch.column(columns[0])))
    ):
        return texts
    return _joined(batch.num_rows, columns, keys, names, lambda name: _values(batch.column(name)))


def _joined(
    num_rows: int,
    columns: Sequence[str],
    keys: Keys,
    names: Sequence[str],
    values: Callable[[str], Sequence[Any]],
) -> Rows:
    """Return the rows of `columns`; `values` returns the values of a stored column."""

    def of(column: str | None) -> Sequence[Any]:
        if column is None:
            return [None] * num_rows
        if column in names:
            return values(column)
        stored, _, path = column.partition(".")
        return [None if v is None else value_at(v, path) for v in values(stored)]

    return [list(row) for row in zip(*map(of, _aligned(columns, keys)), strict=True)]


def _values(column: Any) -> list[Any]:
    """Return the values; bytes that are not UTF-8, which the format allows, become surrogates."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        contents = column.cast("large_binary").to_pylist()
        return [c if c is None else c.decode("utf-8", "surrogateescape") for c in contents]


def _columns(path: str, keys: Keys, names: Sequence[str]) -> list[str]:
    """Return those of `keys` that are columns, or paths into them. Raise DataError if none of the
    wanted ones exists."""
    stored = [key for key in keys.wanted if _is_stored(key, names)]
    if not stored:
        wanted = " or ".join(map(repr, keys.wanted))
        there = ", ".join(sorted(names)[:20]) or "none"
        remedy = remedy_for_row(names) or f" -> {keys.argument}: {there}"
        raise DataError(f"{path}: no column {wanted}{remedy}")
    columns = [*stored, *(key for key in keys.optional if _is_stored(key, names))]
    for name in _stored(columns, names):
        if list(names).count(name) > 1:
            raise DataError(
                f"{path}: {list(names).count(name)} columns are named {name!r}, so which one is "
                f"meant is ambiguous -> rename them, or name another column: {keys.argument}"
            )
    return columns


def _is_stored(key: str, names: Sequence[str]) -> bool:
    return key in names or ("." in key and key.partition(".")[0] in names)


def _stored(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns of a table that contain `columns`, each once."""
    return list(dict.fromkeys(c if c in names else c.partition(".")[0] for c in columns))
