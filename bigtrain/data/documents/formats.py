"""All formats, and reading of documents in memory bounded by the longest allowed document.

To add a format, add a subclass of `PartReader` and its entry in `READERS`: discovery, the help of
``--input``, splitting and change detection follow from it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence

from bigtrain.data.documents.compression import READ_ERRORS, without_compression
from bigtrain.data.documents.csv_reader import CsvReader
from bigtrain.data.documents.dataset_readers import HubDatasetReader, SavedDatasetReader
from bigtrain.data.documents.files import Source
from bigtrain.data.documents.line_readers import JsonLinesReader, JsonReader, TextReader
from bigtrain.data.documents.reader import (
    PartReader,
    ReadOptions,
    RejectedDocuments,
    SourcePart,
    unsplit,
)
from bigtrain.data.documents.table_readers import ArrowReader, ParquetReader
from bigtrain.errors import DataError, first_line

READERS: tuple[type[PartReader], ...] = (
    *(TextReader, JsonLinesReader, JsonReader, CsvReader),
    *(ParquetReader, ArrowReader, SavedDatasetReader, HubDatasetReader),
)
BY_SUFFIX = {suffix: reader for reader in READERS for suffix in reader.suffixes}
ROW_SUFFIXES = tuple(suffix for suffix, reader in BY_SUFFIX.items() if reader.has_rows)
DEFAULT_SUFFIXES = tuple(suffix for reader in READERS for suffix in reader.folder_suffixes)
"""Suffixes of the files that are read from a folder without ``--suffix``."""
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 2048


def part_reader(part: SourcePart, options: ReadOptions, rejects: RejectedDocuments) -> PartReader:
    """Return the reader for the format of `part`'s source."""
    reader: type[PartReader] = part.source.format
    return reader(part, options, rejects)


def format_of(file_name: str) -> type[PartReader]:
    """Return the format of a file, or of a suffix (``.jsonl``), without compression; text if
    unknown."""
    bare = without_compression(file_name.lower())
    suffix = bare if bare in BY_SUFFIX else os.path.splitext(bare)[1]
    return BY_SUFFIX.get(suffix, TextReader)


def keys_in(source: Source, options: ReadOptions, *, strict: bool = False) -> Collection[str]:
    """Return the keys of the first row of `source`: of JSON lines and .json the first object, of
    tables and datasets the columns. Empty for text, compressed tables, named pipes
    (readable only once), and unreadable files: for these `strict` raises DataError, otherwise they
    are refused later."""
    if source.needs_decompression or source.read_once:
        return ()
    reader: type[PartReader] = source.format
    try:
        return reader.first_row_keys(source, options)
    except (DataError, *READ_ERRORS) as error:
        if strict and isinstance(error, DataError):
            raise
        if strict:
            raise DataError(f"{source.path} cannot be read: {first_line(error)}") from error
    return ()


class DocumentReader:
    """Reader of the documents of `sources`, in order. `bytes_done` is updated for progress."""

    def __init__(
        self, sources: Sequence[Source], options: ReadOptions, rejects: RejectedDocuments
    ) -> None:
        self.sources = sources
        self.options = options
        self.rejects = rejects
        self.num_documents = 0
        self.bytes_done = 0
        sizes = [source.record.bytes for source in sources]
        self.total_bytes = None if None in sizes else sum(size or 0 for size in sizes)

    def text_batches(self) -> Iterator[list[str]]:
        """Yield texts in lists of about a million bytes. Raise DataError with file and line of
        unreadable documents; see `RejectedDocuments`."""
        for contents in document_batches(self.blocks()):
            yield [content.decode("utf-8") for content in contents]

    def blocks(self) -> Iterator[list[bytes]]:
        """Yield the documents as UTF-8; see `PartReader.blocks`."""
        finished_bytes = 0
        for source in self.sources:
            reader = part_reader(unsplit(source), self.options, self.rejects)
            for documents in reader.blocks():
                self.bytes_done = finished_bytes + reader.bytes_done
                self.num_documents += len(documents)
                yield documents
            finished_bytes += source.record.bytes or 0
            self.bytes_done = finished_bytes


def document_batches(blocks: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the documents of `blocks` in lists of about `BATCH_BYTES`, or of `BATCH_DOCUMENTS`."""
    batch: list[bytes] = []
    batch_bytes = 0
    for block in blocks:
        for content in block:
            batch.append(content)
            batch_bytes += len(content)
            if batch_bytes >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch
