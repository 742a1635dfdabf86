"""Rows with Arrow's JSON type are the rows that were written, wherever the type is in a column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow as pa
import pytest
from datasets import Features, Json, LargeList, List, Value
from pyarrow import feather, parquet

from bigtrain.data.documents.chat_formats import FORMATS
from bigtrain.data.documents.dataset_readers import HubDatasetReader
from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection, Source
from bigtrain.data.documents.formats import part_reader
from bigtrain.data.documents.reader import ReadOptions, RejectedDocuments, unsplit
from bigtrain.data.shards.manifest import SourceRecord
from bigtrain.errors import DataError


def chat(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "done"},
    ]


def tool(properties: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


CHATS = [
    {"messages": chat({"a": 1, "n": None}), "tools": tool({"a": {"type": "integer"}})},
    {"messages": chat({"b": ["x", {"c": 2.5}]}), "tools": tool({"b": {"type": "array"}})},
]
CALL = {"type": Value("string"), "function": {"name": Value("string"), "arguments": Json()}}
MESSAGE = {"role": Value("string"), "content": Value("string"), "tool_calls": List(CALL)}
TOOL = {
    "type": Value("string"),
    "function": {
        "name": Value("string"),
        "parameters": {"type": Value("string"), "properties": Json()},
    },
}
LARGE_MESSAGE = {**MESSAGE, "content": Value("large_string")}
COLUMNS: dict[str, Features] = {
    "objects": Features({"messages": List(Json()), "tools": List(Json())}),
    "columns": Features({"messages": Json(), "tools": Json()}),
    "leaves": Features({"messages": List(MESSAGE), "tools": List(TOOL)}),
    "large": Features({"messages": LargeList(LARGE_MESSAGE), "tools": LargeList(TOOL)}),
    "text": Features({"messages": List(Json(decode=False)), "tools": Json(decode=False)}),
}


def as_parquet(dataset: datasets.Dataset, folder: Path) -> str:
    dataset.to_parquet(str(folder / "x.parquet"))
    return str(folder / "x.parquet")


def as_arrow(dataset: datasets.Dataset, folder: Path) -> str:
    table = dataset.data.table
    with pa.OSFile(str(folder / "x.arrow"), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return str(folder / "x.arrow")


def as_feather(dataset: datasets.Dataset, folder: Path) -> str:
    feather.write_feather(dataset.data.table, str(folder / "x.feather"))
    return str(folder / "x.feather")


def as_features_only(dataset: datasets.Dataset, folder: Path) -> str:
    """A file whose types were lost, as a tool without extension types writes it."""
    table = dataset.data.table
    fields = [pa.field(f.name, without_json(f.type)) for f in table.schema]
    columns = [stored(c.combine_chunks()) for c in table.columns]
    schema = pa.schema(fields, metadata=table.schema.metadata)
    parquet.write_table(pa.Table.from_arrays(columns, schema=schema), folder / "x.parquet")
    return str(folder / "x.parquet")


def without_json(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.JsonType):
        return pa.large_string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(without_json(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, without_json(field.type)) for field in kind])
    return kind


def stored(column: Any) -> Any:
    return pa.array(column.to_pylist(), without_json(column.type))


def as_saved(dataset: datasets.Dataset, folder: Path) -> str:
    dataset.save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


WRITERS: list[Callable[[datasets.Dataset, Path], str]] = [
    as_parquet,
    as_arrow,
    as_feather,
    as_features_only,
    as_saved,
]


def read(path: str, name: str = "messages", **options: Any) -> list[Any]:
    """Return the documents of a source; name: of the format, or "text"."""
    selection = Selection(inputs=[path])
    if name != "text":
        keys = FORMATS[name].keys[:1]
        options = {"chat": True, "chat_format": name, "text_keys": keys, **options}
    reading = ReadOptions(selection, **options)
    [source] = find_sources(selection)
    blocks = part_reader(unsplit(source), reading, RejectedDocuments(False, None)).blocks()
    contents = [content for block in blocks for content in block]
    return [content.decode() if name == "text" else orjson.loads(content) for content in contents]


@pytest.mark.parametrize(
    ("kind", "write"),
    [*((kind, as_parquet) for kind in sorted(COLUMNS)), *(("leaves", w) for w in WRITERS[1:])],
)
def test_conversations_are_those_that_were_written(
    kind: str, write: Callable[[datasets.Dataset, Path], str], tmp_path: Path
) -> None:
    """Keys without a value that JSON has are the author's, those of a struct are not."""
    dataset = datasets.Dataset.from_list(CHATS, features=COLUMNS[kind])
    assert "json" in str(dataset.data.table.schema)
    assert read(write(dataset, tmp_path)) == CHATS


@pytest.mark.parametrize("write", [as_parquet, as_features_only, as_saved])
def test_other_columns_may_have_json(
    write: Callable[[datasets.Dataset, Path], str], tmp_path: Path
) -> None:
    """Pairs, labels and plain text."""
    answers = [{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]
    asked = [{"role": "user", "content": "q"}]
    row = {
        "prompt": asked, "chosen": answers[0], "rejected": answers[1], "completion": answers[0],
        "label": True, "text": "plain",
    }  # fmt: skip
    features = Features({name: Json() for name in row})
    path = write(datasets.Dataset.from_list([row], features=features), tmp_path)
    [pair] = read(path, "preference")
    sides = {side: pair[side]["messages"] for side in ("chosen", "rejected")}
    assert sides == {"chosen": [*asked, *answers[0]], "rejected": [*asked, *answers[1]]}
    [labeled] = read(path, "kto")
    assert labeled["label"] == 1
    assert read(path, "text") == ["plain"]
    tokens = {"input_ids": [1, 2], "labels": [-100, 2]}
    features = Features({"input_ids": List(Json()), "labels": Json()})
    (tmp_path / "tokens").mkdir()
    path = write(datasets.Dataset.from_list([tokens], features=features), tmp_path / "tokens")
    [row_of_tokens] = read(path, "tokens")
    assert row_of_tokens["input_ids"] == [1, 2]


def test_a_hub_dataset_with_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `push_to_hub` writes it, and streamed by `datasets`, which decodes it."""
    as_parquet(datasets.Dataset.from_list(CHATS, features=COLUMNS["objects"]), tmp_path)
    streamed = datasets.load_dataset(str(tmp_path), split="train", streaming=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: streamed)
    source = Source(HubDatasetReader, SourceRecord(path="a/b", revision="main"))
    options = ReadOptions(Selection(inputs=["a/b"]), chat=True, text_keys=("messages",))
    reader = part_reader(unsplit(source), options, RejectedDocuments(False, None))
    assert [orjson.loads(content) for block in reader.blocks() for content in block] == CHATS


def test_text_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"role": "user"', "x"]))
    parquet.write_table(pa.table({"messages": column}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet cannot be read: column 'messages' is of Arro"):
        read(str(tmp_path / "x.parquet"))
