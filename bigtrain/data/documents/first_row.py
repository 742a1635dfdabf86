"""Keys of the first row of an input, from which its format is detected."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator

import xxhash

from bigtrain.data.documents.line_readers import parsed_line
from bigtrain.data.documents.reader import ReadOptions
from bigtrain.data.documents.table_rows import (
    arrow_columns,
    delimiter_of,
    open_hf_dataset,
    parquet_columns,
)
from bigtrain.data.sources.discovery import Source, find_sources
from bigtrain.data.sources.files import READ_ERRORS, open_stream, split_lines, stream_chunks
from bigtrain.errors import DataError, first_line

LOOKED_AT = 64
"""Number of files, in addition to the first one, whose first row is read."""
HEAD_BYTES = 1 << 20
"""Bytes read for the first object of a .json file, which may be one line."""


def keys_of_first_row(options: ReadOptions, *, strict: bool = False) -> Collection[str]:
    """Return the keys in the first source: of JSON lines and .json the keys of the first object, of
    tables and datasets the columns. Empty for text, compressed parquet and arrow, named pipes
    (readable only once), and unreadable files: for these `strict` raises DataError, else they are
    refused later."""
    sources = find_sources(options.selection)
    return keys_in(sources[0], options, strict=strict) if sources else ()


def sources_to_look_at(options: ReadOptions) -> list[Source]:
    """Return the first source, and up to `LOOKED_AT` others on this machine, spread over all of
    them."""
    sources = find_sources(options.selection)
    others = [source for source in sources[1:] if source.address is None]
    return sources[:1] + others[:: max(1, -(-len(others) // LOOKED_AT))]


def keys_in(source: Source, options: ReadOptions, *, strict: bool = False) -> Collection[str]:
    """Return `keys_of_first_row` of one source."""
    if source.needs_decompression or source.read_once:
        return ()
    find = _KEYS.get(source.kind)
    if find is None:
        return ()
    try:
        return find(source, options)
    except (DataError, *READ_ERRORS) as error:
        if strict and isinstance(error, DataError):
            raise
        if strict:
            raise DataError(f"{source.path} cannot be read: {first_line(error)}") from error
    return ()


def _keys_of_line(source: Source, options: ReadOptions) -> Collection[str]:
    for line in _lines(source, options.max_document_bytes):
        if line.strip():
            try:
                tree = parsed_line(line)
            except (ValueError, RecursionError):
                return ()
            return list(tree) if isinstance(tree, dict) else ()
    return ()


def _keys_of_json(source: Source, options: ReadOptions) -> Collection[str]:
    """Return the keys of a list's first object, or of the first line's object."""
    with open_stream(source, xxhash.xxh3_64(), whole=False) as stream:
        head = next(stream_chunks(stream, HEAD_BYTES), b"")
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").lstrip(" \t\r\n[")
    try:
        tree, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return ()
    return list(tree) if isinstance(tree, dict) else ()


def _keys_of_header(source: Source, options: ReadOptions) -> Collection[str]:
    lines = (line.decode("utf-8") for line in _lines(source, options.max_document_bytes))
    try:
        return next(csv.reader(lines, delimiter=delimiter_of(source), strict=True), ())
    except (csv.Error, UnicodeDecodeError):
        return ()


def _columns_of_dataset(source: Source, options: ReadOptions) -> Collection[str]:
    dataset = open_hf_dataset(source, options.selection)
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset), ()))


def _lines(source: Source, max_bytes: int) -> Iterator[bytes]:
    with open_stream(source, xxhash.xxh3_64(), whole=False) as stream:
        first = True
        for lines in split_lines(stream_chunks(stream), max_bytes):
            for line in lines:
                if line is not None:
                    yield line.removeprefix(b"\xef\xbb\xbf") if first else line
                first = False


_KEYS: dict[str, Callable[[Source, ReadOptions], Collection[str]]] = {
    "jsonl": _keys_of_line,
    "json": _keys_of_json,
    "csv": _keys_of_header,
    "parquet": lambda source, _: parquet_columns(source),
    "arrow": lambda source, _: arrow_columns(source),
    "saved_dataset": _columns_of_dataset,
    "hub_dataset": _columns_of_dataset,
}
"""Readers by `Source.kind`."""
