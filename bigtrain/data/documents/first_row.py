"""The keys of the first row of an input, from which its format is detected."""

from __future__ import annotations

from collections.abc import Collection

import orjson
import xxhash

from bigtrain.data.documents.parts import ReadOptions
from bigtrain.data.sources.discovery import Source, find_sources
from bigtrain.data.sources.files import open_stream
from bigtrain.data.sources.lines import split_lines, stream_chunks


def keys_of_first_row(options: ReadOptions) -> Collection[str]:
    """Of the first source: of JSON lines the first line's keys, of parquet and arrow its columns.
    None are known of text, of other tables, of a named pipe, whose bytes come once, and of what
    cannot be read, which is refused later."""
    sources = find_sources(options.selection)
    source = sources[0] if sources else None
    if source is None or source.is_unpacked or source.read_once:
        return ()
    if source.kind == "jsonl":
        return _keys_of_line(source, options.max_document_bytes)
    if source.kind == "parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            return list(parquet.read_schema(source.path).names)
        except (ArrowInvalid, OSError):
            return ()
    return ()


def _keys_of_line(source: Source, max_bytes: int) -> Collection[str]:
    with open_stream(source, xxhash.xxh3_64()) as stream:
        for lines in split_lines(stream_chunks(stream), max_bytes):
            for line in lines:
                if line is not None and line.strip():
                    try:
                        tree = orjson.loads(line.removeprefix(b"\xef\xbb\xbf"))
                    except ValueError:
                        return ()
                    return list(tree) if isinstance(tree, dict) else ()
    return ()
