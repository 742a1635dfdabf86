"""Rows of tables: the values of some columns, in blocks. Raises DataError for missing columns.

A row is a list of values (None if a column has none). Arrow columns of text become UTF-8
without a Python string per row, which costs as much as encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bigtrain.data.documents.chat_formats import remedy_for_row, value_at
from bigtrain.data.documents.json_columns import Decoder
from bigtrain.errors import DataError


@dataclass(frozen=True)
class TextColumn:
    """Rows of a text column: `joined` is their concatenation."""

    contents: list[bytes]
    joined: bytes

    def rows(self) -> list[list[str]]:
        return [[content.decode("utf-8")] for content in self.contents]


def require_sound(column: Any) -> None:
    """Raise ArrowInvalid if the arrow array `column` has offsets outside of the buffers. A corrupt
    file can produce one, and reading its rows would crash the process. Text that is not UTF-8 is
    accepted: it is checked per row."""
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
    import numpy as np
    import pyarrow

    column_type = column.type
    if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
        return None
    offset_type = np.dtype("<i8" if pyarrow.types.is_large_string(column_type) else "<i4")
    if column.null_count or not len(column):
        return None
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return None
    _, offset_buffer, data = column.buffers()
    # A slice of an array shares the buffers, of which its texts begin at the first offset.
    offsets = np.frombuffer(
        offset_buffer, offset_type, len(column) + 1, column.offset * offset_type.itemsize
    )
    first, last = int(offsets[0]), int(offsets[-1])
    joined = data.slice(first, last - first).to_pybytes() if last > first else b""
    bounds = (offsets - first).tolist()
    return TextColumn([joined[begin:end] for begin, end in pairwise(bounds)], joined)


READ_BYTES = 1 << 21
"""Approximate bytes of rows read at a time, since a document may have many megabytes."""
MAX_ROWS_PER_READ = 4096


Rows = list[list[Any]]


@dataclass(frozen=True)
class Keys:
    """Columns to read. A `primary` column, which a command's `argument` names, must exist. A row
    has the values of the existing primary columns, then of the `optional` columns, None for missing
    ones. `all_columns`: then the values of every further column, for a filter."""

    primary: Sequence[str]
    optional: Sequence[str] = ()
    argument: str = "--text-key"
    all_columns: bool = False


@dataclass(frozen=True)
class RowBlock:
    """Rows that were read together, starting with row `row` of the source. `share_done`: share
    of the part that was read before, for progress; 0.0 if unknown."""

    row: int
    values: Rows | TextColumn
    share_done: float = 0.0


def rows_per_read(num_bytes: int, num_rows: int) -> int:
    """Return the number of rows in about `READ_BYTES`, if `num_rows` have `num_bytes`."""
    return max(1, min(MAX_ROWS_PER_READ, READ_BYTES * num_rows // max(1, num_bytes)))


def bytes_of_columns(row_group: Any, columns: Sequence[str]) -> int:
    """Return the decompressed bytes of `columns` in a parquet `row_group` of the metadata."""
    chunks = [row_group.column(number) for number in range(row_group.num_columns)]
    return sum(
        int(chunk.total_uncompressed_size)
        for chunk in chunks
        # A struct column has several chunks: text, messages.list.element.content, ...
        if any(f"{chunk.path_in_schema}.".startswith(f"{column}.") for column in columns)
    )


def aligned(columns: Sequence[str], keys: Keys) -> list[str | None]:
    """Return the names of the values of a row: primary columns; each optional key, None if it is
    missing; other columns."""
    primary_columns = [column for column in columns if column in keys.primary]
    optional = [key if key in columns else None for key in keys.optional]
    # Only a filter reads other columns.
    other_columns = [name for name in columns if name not in (*keys.primary, *keys.optional)]
    return [*primary_columns, *optional, *other_columns]


def rows_of_batch(
    batch: Any, columns: Sequence[str], keys: Keys, decoders: Mapping[str, Decoder]
) -> Rows | TextColumn:
    """Return the rows of an arrow record batch. `decoders`: of columns with JSON."""
    names = batch.schema.names
    if (
        len(columns) == 1
        and columns[0] in names
        and columns[0] not in decoders
        and (texts := text_column(batch.column(columns[0])))
    ):
        return texts

    def values_of(name: str) -> Sequence[Any]:
        column = batch.column(name)
        try:
            column_values = list(column.to_pylist())
        except UnicodeDecodeError:
            # Bytes that are not UTF-8, which the format allows, become surrogates.
            contents = column.cast("large_binary").to_pylist()
            column_values = [
                content if content is None else content.decode("utf-8", "surrogateescape")
                for content in contents
            ]
        return decoded(name, column_values, decoders)

    return joined_rows(batch.num_rows, columns, keys, names, values_of)


def decoded(name: str, values: Sequence[Any], decoders: Mapping[str, Decoder]) -> Sequence[Any]:
    """Return the `values` of column `name` with their JSON decoded. Raises ArrowInvalid."""
    decoder = decoders.get(name)
    if decoder is None:
        return values
    try:
        return [value if value is None else decoder(value) for value in values]
    except (ValueError, RecursionError) as error:
        from pyarrow import ArrowInvalid

        raise ArrowInvalid(
            f"column {name!r} is of Arrow's JSON type and has text that is not JSON: {error}"
        ) from error


def joined_rows(
    num_rows: int,
    columns: Sequence[str],
    keys: Keys,
    names: Sequence[str],
    values_of: Callable[[str], Sequence[Any]],
) -> Rows:
    """Return the rows of `columns`, with a value in each column of `aligned`. values_of: returns
    the values of a stored column."""

    def column_values(column: str | None) -> Sequence[Any]:
        if column is None:
            return [None] * num_rows
        if column in names:
            return values_of(column)
        stored_column, _, path = column.partition(".")
        return [None if v is None else value_at(v, path) for v in values_of(stored_column)]

    return [list(row) for row in zip(*map(column_values, aligned(columns, keys)), strict=True)]


def columns_of(path: str, keys: Keys, names: Sequence[str]) -> list[str]:
    """Return the keys that are columns, or paths into columns. Raise DataError if no primary key
    exists."""
    stored = [key for key in keys.primary if _is_stored(key, names)]
    if not stored:
        key_names = " or ".join(map(repr, keys.primary))
        column_names = ", ".join(sorted(names)[:20]) or "none"
        fix = remedy_for_row(names) or f" -> {keys.argument}: {column_names}"
        raise DataError(f"{path}: no column {key_names}{fix}")
    columns = [*stored, *(key for key in keys.optional if _is_stored(key, names))]
    if keys.all_columns:
        columns += [name for name in names if name not in columns]
    for name in stored_columns(columns, names):
        if list(names).count(name) > 1:
            raise DataError(
                f"{path}: {list(names).count(name)} columns are named {name!r}, so which one is "
                f"meant is ambiguous -> rename them, or name another column: {keys.argument}"
            )
    return columns


def _is_stored(key: str, names: Sequence[str]) -> bool:
    """Return whether `key` is one of the columns `names`, or a path into a column."""
    return key in names or ("." in key and key.partition(".")[0] in names)


def stored_columns(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns of a table that contain `columns`, each once."""
    return list(dict.fromkeys(c if c in names else c.partition(".")[0] for c in columns))
