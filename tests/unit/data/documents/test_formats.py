"""A data format is declared once, by its reader: everything else follows from that class."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigtrain.data.documents import formats
from bigtrain.data.documents.compression import COMPRESSION_SUFFIXES
from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection, Source
from bigtrain.data.documents.reader import ReadOptions, SourcePart, even_parts
from bigtrain.data.documents.table_readers import TableReader
from bigtrain.data.documents.table_rows import RowBlock, columns_of, joined_rows
from bigtrain.data.tokenize_job.options import TokenizeOptions
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import DataError
from bigtrain.python_api.tokenizing import build_tokens
from bigtrain.system.arguments import field_texts
from tests.support.pages import page_text


class ColumnsReader(TableReader):
    """A made-up table: a JSON object of columns."""

    format_name = "columns"
    suffixes = (".columns",)

    @classmethod
    def first_row_keys(cls, source: Source, options: ReadOptions) -> Collection[str]:
        return list(json.loads(Path(source.path).read_text()))

    @classmethod
    def split(cls, source: Source, options: ReadOptions, shard_bytes: int) -> list[SourcePart]:
        columns = json.loads(Path(source.path).read_text())
        return even_parts(source, len(next(iter(columns.values()))), shard_bytes)

    def _rows(self, file: Any) -> Iterator[RowBlock]:
        path, keys, begin = self.part.source.path, self.options.keys, self.part.begin
        table = json.loads(Path(path).read_text())
        table = {name: values[begin : self.part.end] for name, values in table.items()}
        names = list(table)
        wanted = columns_of(path, keys, names)
        rows = joined_rows(len(table[names[0]]), wanted, keys, names, table.__getitem__)
        yield RowBlock(begin, rows)


def test_help_and_docs_list_every_suffix() -> None:
    text = field_texts(TokenizeOptions)["inputs"]
    page = page_text("docs/howto/your_data.md")
    for suffix in (*formats.ROW_SUFFIXES, *COMPRESSION_SUFFIXES):
        assert suffix in re.findall(r"\.\w+", text), suffix
        assert f"`{suffix}`" in page, suffix


def test_a_new_format_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, split, tokenized and compared after a touch, by its registration alone."""
    texts = [f"alpha beta {number}" for number in range(40)]
    path = tmp_path / "in.columns"
    path.write_text(json.dumps({"text": texts}))
    assert find_sources(Selection([str(path)]))[0].format_name == "text"
    monkeypatch.setitem(formats.BY_SUFFIX, ".columns", ColumnsReader)
    (source,) = find_sources(Selection([str(path)]))
    assert source.format_name == "columns"
    assert list(formats.keys_in(source, ReadOptions(Selection([])))) == ["text"]
    train_tokenizer([texts], 300).save(tmp_path / "tokenizer")

    def build() -> Any:
        return build_tokens(
            TokenizeOptions(
                path, tmp_path / "tokenizer", tmp_path / "d", workers=1, shard_bytes=300
            )
        )

    manifest = build().manifest
    assert manifest.num_documents("train") == 40
    assert len(manifest.splits["train"]) > 1
    os.utime(path, ns=(1, 1))
    assert build().already_finished
    path.write_text(json.dumps({"text": [*texts[:-1], "alpha beta gg"]}))
    with pytest.raises(DataError, match="contains a dataset of other input files"):
        build()
