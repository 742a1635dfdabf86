"""Rows of tables are read by their size; what a part held does not depend on how many at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from bigtrain.data.documents import table_rows as tables
from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection
from bigtrain.data.documents.formats import part_reader
from bigtrain.data.documents.reader import (
    BadDocument,
    PartReader,
    ReadOptions,
    RejectedDocuments,
    unsplit,
)
from bigtrain.errors import DataError

KINDS = ["parquet", "arrow", "saved"]


def save(path: Path, kind: str, table: pa.Table, row_group_size: int | None = None) -> Path:
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=row_group_size)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=row_group_size)
    else:
        import datasets

        datasets.Dataset(table).save_to_disk(str(path))
    return path


def name_of(kind: str, stem: str = "x") -> str:
    return stem if kind == "saved" else f"{stem}.{kind}"


def reader_of(path: Path, bad: list[BadDocument], limit: int = 1 << 26) -> PartReader:
    selection = Selection(inputs=[str(path)])
    options = ReadOptions(selection, max_document_bytes=limit)
    return part_reader(
        unsplit(find_sources(selection)[0]), options, RejectedDocuments(True, bad.append)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_large_rows_are_read_a_few_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 256 rows of 64 MB each nobody has the memory."""
    monkeypatch.setattr(tables, "READ_BYTES", 5000)
    monkeypatch.setattr(tables, "MAX_ROWS_PER_READ", 40)
    texts = [chr(97 + i % 26) * 1000 for i in range(30)] + ["small"] * 200
    path = tmp_path / name_of(kind)
    # Groups of their own: large rows and small ones.
    save(path, kind, pa.table({"id": range(230), "text": texts}), row_group_size=30)
    blocks = list(reader_of(path, []).blocks())
    assert [text for block in blocks for text in block] == [text.encode() for text in texts]
    large = [len(block) for block in blocks if len(block[0]) == 1000]
    if kind != "saved":
        assert max(large) <= 5
        assert max(map(len, blocks)) == 30  # of small rows a whole group
    else:  # whose rows are taken to be of one size
        assert max(map(len, blocks)) == 5000 * 230 // pa.table({"t": texts}).nbytes


def test_structures_count_with_all_their_columns(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "x" * 996}
    rows = pa.table({"text": ["t"] * 20, "texts": ["y" * 10000] * 20, "chat": [[turn]] * 20})
    parquet.write_table(rows, tmp_path / "x.parquet", use_dictionary=False, compression="none")
    group = parquet.read_metadata(tmp_path / "x.parquet").row_group(0)
    sizes = {name: tables.bytes_of_columns(group, [name]) for name in rows.column_names}
    assert sum(sizes.values()) == tables.bytes_of_columns(group, rows.column_names)
    assert sum(sizes.values()) == group.total_byte_size
    assert sizes["texts"] > 200_000 > sizes["chat"] > 20_000 > sizes["text"]


def test_a_batch_that_claims_more_rows_than_it_has_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.arrow", "arrow", pa.table({"text": ["abc"] * 77}))
    claimed = path.read_bytes().replace((77).to_bytes(8, "little"), (7777).to_bytes(8, "little"))
    path.write_bytes(claimed)
    assert pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0).num_rows == 7777
    with pytest.raises(DataError, match=r"x\.arrow cannot be read: .*[Bb]uffer #1 too small"):
        list(reader_of(path, []).blocks())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.list_(pa.string())], ids=str)
def test_an_offset_beyond_the_data_is_refused(kind: pa.DataType, tmp_path: Path) -> None:
    value = ["abc"] if pa.types.is_list(kind) else "abc"
    path = save(tmp_path / "x.arrow", "arrow", pa.table({"text": pa.array([value] * 77, kind)}))
    width = 8 if pa.types.is_large_string(kind) else 4
    content = path.read_bytes()
    offset, other = (value.to_bytes(width, "little") for value in (71 * 3, 1 << 30))
    assert content.count(offset) == 1
    path.write_bytes(content.replace(offset, other))
    with pytest.raises(DataError, match=r"x\.arrow cannot be read: .*[Oo]ffset"):
        list(reader_of(path, []).blocks())


ROWS: Sequence[Any] = ["one", None, "two", "y" * 50, "", "three", None, "four"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_does_not_depend_on_how_much_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / name_of(kind), kind, pa.table({"text": ROWS}))
    readings = set()
    for size in (1, 8, 30, 1 << 20):
        monkeypatch.setattr(tables, "READ_BYTES", size)
        bad: list[BadDocument] = []
        reader = reader_of(path, bad, limit=20)
        documents = b"|".join(text for block in reader.blocks() for text in block)
        reasons = json.dumps([[one.row, one.reason] for one in bad])
        readings.add((documents, reader.checksum(), reader.layout(), reasons))
    ((documents, _, _, reasons),) = readings
    assert documents == b"one|two||three|four"
    assert [row for row, _ in json.loads(reasons)] == [1, 3, 6]


@pytest.mark.parametrize(
    "other",
    [
        ["onetwo", None, "", "y" * 50, "", "three", None, "four"],
        [None, "one", "two", "y" * 50, "", "three", None, "four"],
        ["one", "two", "y" * 50, "", "three", None, "four"],
        ["one", "y" * 50, "two", None, "", "three", None, "four"],
    ],
    ids=["joined", "moved", "left out", "for another reason"],
)
def test_other_rows_are_another_layout(other: Sequence[Any], tmp_path: Path) -> None:
    layouts = []
    for stem, rows in (("a", ROWS), ("b", other)):
        reader = reader_of(
            save(tmp_path / name_of("parquet", stem), "parquet", pa.table({"text": rows})), [], 20
        )
        for _ in reader.blocks():
            pass
        layouts.append((reader.checksum(), reader.layout()))
    assert layouts[0][0] == layouts[1][0]  # the same letters
    assert layouts[0][1] != layouts[1][1]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv", "tsv"])
def test_two_columns_of_one_name(kind: str, tmp_path: Path) -> None:
    """Refused if it is one that is read; of others nobody asks."""
    path = tmp_path / f"a.{kind}"
    names = ["text", "other", "text"]
    for columns, is_refused in ((names, True), (["other", "text", "other"], False)):
        table = pa.Table.from_arrays([pa.array([name]) for name in "abc"], names=columns)
        if kind == "parquet":
            parquet.write_table(table, path)
        elif kind == "arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        else:
            separator = "," if kind == "csv" else "\t"
            path.write_text("\n".join(separator.join(row) for row in (columns, "abc")) + "\n")
        options = ReadOptions(Selection([str(path)]))
        (source,) = find_sources(options.selection)
        reader = part_reader(unsplit(source), options, RejectedDocuments(False))
        if is_refused:
            with pytest.raises(DataError, match=r"2 columns are named 'text'.* -> rename them"):
                list(reader.blocks())
        else:
            assert list(reader.blocks()) == [[b"b"]]
