"""Reader of csv and tsv files, one document per row."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from typing import Any

from bigtrain.data.documents.compression import without_compression
from bigtrain.data.documents.files import (
    Source,
    open_stream,
    split_lines,
    stream_chunks,
    without_mark,
)
from bigtrain.data.documents.line_readers import first_lines
from bigtrain.data.documents.reader import BadDocument, ReadOptions
from bigtrain.data.documents.table_readers import RowReader
from bigtrain.data.documents.table_rows import aligned, columns_of
from bigtrain.errors import DataError


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
        # The csv module has only a limit for the process: it is restored at the end.
        previous_limit = csv.field_size_limit(self.options.max_document_bytes)
        reader = csv.reader(self._lines(chunks), **_dialect(self.part.source, self.options))
        line, names = 1, []
        try:
            # The header decides the columns to read, and the length of a row.
            names = next(reader, [])
            self.columns = [name for name in columns_of(path, keys, names) if name in names]
            # Positions in a row of the columns that are read; None for a missing column.
            field_numbers = [
                None if name is None else names.index(name) for name in aligned(self.columns, keys)
            ]
            line = reader.line_num + 1
            for fields in reader:
                if len(fields) == len(names):
                    num_rows += 1
                    yield line, [None if n is None else fields[n] for n in field_numbers]
                elif fields:  # an empty line is not a row
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
        # num_tabs: of the header; -1 if its names are quoted, so that quotes are not ambiguous.
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
