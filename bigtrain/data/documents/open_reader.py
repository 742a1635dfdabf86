"""Readers of sources and of parts of them, in memory bounded by the longest allowed document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bigtrain.data.documents.bad_documents import RejectedDocuments
from bigtrain.data.documents.line_readers import JsonLinesReader, JsonReader, TextReader
from bigtrain.data.documents.reader import Part, PartReader, ReadOptions, whole
from bigtrain.data.documents.table_readers import CsvReader, TableReader
from bigtrain.data.sources.discovery import Source

READERS: dict[str, type[PartReader]] = {
    "text": TextReader,
    "jsonl": JsonLinesReader,
    "json": JsonReader,
    "csv": CsvReader,
}
"""Readers by `Source.kind`; all others are tables."""
BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 2048


def part_reader(part: Part, options: ReadOptions, rejects: RejectedDocuments) -> PartReader:
    """Return the reader for the kind of `part`'s source."""
    return READERS.get(part.source.kind, TableReader)(part, options, rejects)


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
        for contents in batched(self.blocks()):
            yield [content.decode("utf-8") for content in contents]

    def blocks(self) -> Iterator[list[bytes]]:
        finished = 0
        for source in self.sources:
            reader = part_reader(whole(source), self.options, self.rejects)
            for documents in reader.blocks():
                self.bytes_done = finished + reader.bytes_done
                self.num_documents += len(documents)
                yield documents
            finished += source.record.bytes or 0
            self.bytes_done = finished


def batched(blocks: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the documents of `blocks` in lists of about a million bytes, at least one each."""
    batch: list[bytes] = []
    size = 0
    for block in blocks:
        for content in block:
            batch.append(content)
            size += len(content)
            if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
