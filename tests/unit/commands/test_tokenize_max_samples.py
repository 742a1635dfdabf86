"""`bigtrain tokenize --max-samples`: the first rows of the inputs, whatever their files are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import Table, parquet

from bigtrain.cli import main
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import read_manifest
from tests.support.chats import save_chat_tokenizer, turns

TEXTS = [f"text number {n}" for n in range(40)]


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_chat_tokenizer(tmp_path / "tokenizer")
    Path("lines").mkdir()
    for name, begin, end in (("a", 0, 3), ("b", 3, 20), ("c", 20, 40)):
        rows = [json.dumps({"text": text}) for text in TEXTS[begin:end]]
        Path(f"lines/{name}.jsonl").write_text("\n".join(rows) + "\n")
    parquet.write_table(
        Table.from_pylist([{"text": text} for text in TEXTS]), "rows.parquet", row_group_size=4
    )


def tokenize(source: str, output: str, *more: str) -> int:
    words = ["--input", source, "--tokenizer", "tokenizer", "--output", output]
    return main(["tokenize", *words, "--encoder", "reference", *more])


def documents(output: str) -> list[list[int]]:
    return [document["input_ids"].tolist() for document in open_dataset(output)]


@pytest.mark.parametrize(
    ("source", "number"), [("lines", 2), ("lines", 7), ("lines", 100), ("rows.parquet", 7)]
)
def test_the_first_rows_in_their_order(source: str, number: int) -> None:
    """As many as there are, if there are fewer; of small units, too, which workers share."""
    assert tokenize(source, "all") == 0
    more = ("--shard-size", "64B", "--workers", "2")
    assert tokenize(source, "first", "--max-samples", str(number), *more) == 0
    manifest = read_manifest(Path("first"))
    assert manifest.options.max_samples == number
    assert len(manifest.splits["train"]) == 1
    assert documents("first") == documents("all")[:number]


def test_it_is_recorded_and_a_part_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize("lines", "first", "--max-samples", "5") == 0
    assert "tokens/s" in capsys.readouterr().out
    assert tokenize("lines", "first", "--max-samples", "5") == 0
    assert "tokens/s" not in capsys.readouterr().out  # it is finished
    assert main(["inspect", "first"]) == 0
    assert "samples:  the first 5 of the inputs" in capsys.readouterr().out
    assert tokenize("lines", "first", "--max-samples", "6") != 0
    assert "a dataset of other options" in capsys.readouterr().err


def test_filtered_rows_are_not_counted_and_bad_conversations_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("keep_even.py").write_text(
        "def keep(text, row):\n    return int(text.split()[-1]) % 2 == 0\n"
    )
    monkeypatch.syspath_prepend(".")
    assert tokenize("lines", "even", "--filter", "keep_even:keep", "--max-samples", "5") == 0
    assert read_manifest(Path("even")).num_documents("train") == 5
    rows = [turns("question", f"answer {n}") for n in range(6)]
    rows[1] = [{"role": "user", "content": "no answer"}]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    more = ("--chat-key", "messages", "--skip-bad", "--max-samples", "3")
    assert tokenize("chats.jsonl", "chats", *more) == 0
    manifest = read_manifest(Path("chats"))
    assert manifest.num_documents("train") == 2
    bad = [json.loads(line) for line in Path("chats/errors.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in bad] == [2]
