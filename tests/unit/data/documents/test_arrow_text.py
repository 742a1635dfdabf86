"""Columns read without a Python string of every row hold the same documents."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection
from bigtrain.data.documents.formats import DocumentReader
from bigtrain.data.documents.reader import BadDocument, ReadOptions, RejectedDocuments
from bigtrain.data.documents.table_rows import text_column
from bigtrain.errors import DataError
from tests.support.tiers import examples

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=12)


@settings(max_examples=examples(100))
@given(texts=TEXTS, low=st.integers(0, 6), count=st.integers(1, 6), large=st.booleans())
def test_rows_are_the_columns(texts: list[str], low: int, count: int, large: bool) -> None:
    column = pa.array(texts, pa.large_string() if large else pa.string()).slice(low, count)
    expected = [text.encode() for text in texts[low : low + count]]
    column_texts = text_column(column)
    if not expected:
        assert column_texts is None
        return
    assert column_texts is not None
    assert column_texts.contents == expected
    assert column_texts.joined == b"".join(expected)


def invalid() -> pa.Array:
    """The second row is not UTF-8, which no writer of text makes and the format cannot forbid."""
    plain = pa.array([b"fine", b"\xff\xfe", b"also"], pa.binary())
    return pa.Array.from_buffers(pa.string(), 3, plain.buffers())


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None]),
        pa.array([1, 2]),
        pa.array([b"a"]),
        pa.array([["a"]]),
        pa.array(["a"]).dictionary_encode(),
        invalid(),
    ],
    ids=["null", "numbers", "bytes", "lists", "dictionary", "not UTF-8"],
)
def test_what_is_not_text_is_left_to_the_careful_way(column: pa.Array) -> None:
    assert text_column(column) is None


def read(path: Path, limit: int = 1000) -> tuple[list[str], list[BadDocument]]:
    selection, bad = Selection(inputs=[str(path)]), []  # type: ignore[var-annotated]
    options = ReadOptions(selection, max_document_bytes=limit)
    reader = DocumentReader(find_sources(selection), options, RejectedDocuments(True, bad.append))
    return [text for batch in reader.text_batches() for text in batch], bad


def test_bad_rows_among_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"text": invalid()}), path)
    documents, bad = read(path)
    assert documents == ["fine", "also"]
    assert [(document.row, document.reason) for document in bad] == [
        (1, "not UTF-8, or half of a surrogate pair")
    ]
    selection = Selection(inputs=[str(path)])
    reader = DocumentReader(
        find_sources(selection), ReadOptions(selection), RejectedDocuments(False)
    )
    with pytest.raises(DataError, match=r"x\.parquet row 1: not UTF-8"):
        list(reader.text_batches())
    parquet.write_table(pa.table({"text": ["é" * 5, "é" * 6, "", "x"]}), path)
    documents, bad = read(path, limit=10)
    assert documents == ["é" * 5, "", "x"]
    assert [document.row for document in bad] == [1]
    assert "is larger than --max-document-bytes 10" in bad[0].reason
