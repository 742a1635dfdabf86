"""`bigtrain tokenize --filter`: what is kept, counted, refused, and bound to a job."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import csv, parquet

from bigtrain.cli import main
from bigtrain.data.shards.manifest import read_manifest
from tests.support.chats import save_chat_tokenizer, turns

FILTER = """
def keep(text, row):
    if len(text) < 4:
        return "too short"
    if row.get("lang", "en") != "en":
        return f"language {row['lang']}"
    return "no" not in text
"""
ROWS = [
    {"text": f"text {n} {'no' if n % 5 == 0 else 'yes'}", "lang": "de" if n % 3 == 0 else "en"}
    for n in range(30)
] + [{"text": "a", "lang": "en"}]
KEPT = sum(n % 3 != 0 and n % 5 != 0 for n in range(30))
COUNTS = {
    "language de": 10,
    "no reason given": sum(n % 3 != 0 and n % 5 == 0 for n in range(30)),
    "too short": 1,
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    save_chat_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "my_filter.py").write_text(FILTER)
    yield tmp_path
    for name in ("my_filter", "bad_filter"):
        sys.modules.pop(name, None)


def tokenize(source: str, output: str, *more: str) -> int:
    sys.modules.pop("my_filter", None)  # a command is a new process
    words = ["--input", source, "--tokenizer", "tokenizer", "--output", output, *more]
    return main(["tokenize", *words])


def write_rows(kind: str) -> str:
    table = pyarrow.Table.from_pylist(ROWS)
    if kind == "text only":
        parquet.write_table(table.select(["text"]), "rows.parquet")
        return "rows.parquet"
    if kind == "parquet":
        parquet.write_table(table, "rows.parquet")
    elif kind == "csv":
        csv.write_csv(table, "rows.csv")

    else:
        Path(f"rows.{kind}").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return f"rows.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_documents_are_kept_or_counted(
    kind: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(kind)
    assert tokenize(source, "out", "--filter", "my_filter:keep") == 0
    manifest = read_manifest(work / "out")
    assert manifest.num_documents("train") == KEPT
    assert manifest.filtered == COUNTS
    assert manifest.options.text_filter is not None
    assert manifest.options.text_filter.name == "my_filter:keep"
    assert f"my_filter:keep dropped {sum(COUNTS.values())} documents: 10 language de" in (
        capsys.readouterr().out
    )
    assert tokenize(source, "out", "--filter", "my_filter:keep") == 0
    assert "already the finished dataset" in capsys.readouterr().out
    # Other times are compared by content, which the filter is a part of.
    path = work / source
    path.touch()
    assert tokenize(source, "out", "--filter", "my_filter:keep") == 0
    assert "already the finished dataset" in capsys.readouterr().out


def test_a_single_column_of_text_is_filtered(work: Path) -> None:
    assert tokenize(write_rows("text only"), "out", "--filter", "my_filter:keep") == 0
    assert read_manifest(work / "out").filtered == {"no reason given": 6, "too short": 1}


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_conversations_and_files_of_text_and_workers(work: Path, workers: str) -> None:
    chats = [{"messages": turns("hm?", f"{'no' if n % 2 else 'yes'} {n}")} for n in range(20)]
    (work / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    more = ["--filter", "my_filter:keep", "--shard-size", "400"]
    assert tokenize("chats.jsonl", "chats", *more, "--workers", workers) == 0
    manifest = read_manifest(work / "chats")
    assert (manifest.num_documents("train"), manifest.filtered) == (10, {"no reason given": 10})
    (work / "one.txt").write_text("some text")
    (work / "two.txt").write_text("no text")
    words = "tokenize --input one.txt two.txt --tokenizer tokenizer --output texts".split()
    assert main([*words, *more]) == 0
    assert read_manifest(work / "texts").num_documents("train") == 1


BAD = {
    "no_module:keep": ("", "there is no module no_module in "),
    "bad_filter:few": ("def few(text): ...\n", r"called as few\(text, row\), and takes \(text\)"),
    "bad_filter": ("", "not package.module:function"),
    "bad_filter:boom": (
        "def boom(text, row):\n    return helper(row)\ndef helper(row):\n    return row['x']\n",
        r"fails for rows\.jsonl:1: KeyError: 'x' \(.*bad_filter\.py:4\)",
    ),
    "bad_filter:none": ("def none(text, row): ...\n", r"returns None for .*bad_filter\.py:1"),
    "bad_filter:leaves": ("def leaves(text, row):\n    exit(3)\n", r"SystemExit: 3 \(.*:2\)"),
    "bad_filter:empty": ("def empty(text, row):\n    return ''\n", "returns ''"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_faulty_filter_is_one_error_with_its_place(
    name: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, why = BAD[name]
    (work / "bad_filter.py").write_text(content)
    assert tokenize(write_rows("jsonl"), "out", "--filter", name) == 2
    said = capsys.readouterr().err
    assert re.search(why, said), said
    assert len(said.strip().splitlines()) == 1
    assert not (work / "out/manifest.json").exists()


def test_reasons_are_kinds(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "my_filter.py").write_text("def keep(text, row):\n    return text\n")
    (work / "many.jsonl").write_text("".join(f'{{"text": "t{n}"}}\n' for n in range(1001)))
    assert tokenize("many.jsonl", "out", "--filter", "my_filter:keep") == 2
    assert "more than 1,000 different reasons, such as 't1000'" in capsys.readouterr().err


def test_a_job_continues_only_with_the_filter_it_was_started_with(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows("jsonl")
    # The last document stops the job, after finished units.
    stopping = FILTER + "\ndef stop(text, row):\n    return 1 / 0 if text == 'a' else True\n"
    (work / "my_filter.py").write_text(stopping)
    small = ["--shard-size", "300", "--workers", "1"]
    assert tokenize(source, "out", "--filter", "my_filter:stop", *small) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert list((work / "out/.units").glob("*.train.bin"))
    for more, shown in (
        (["--filter", "my_filter:keep"], "was started with --filter my_filter:stop -> start"),
        ([], "was started with --filter my_filter:stop -> start"),
    ):
        assert tokenize(source, "out", *more, *small) == 2
        assert shown in capsys.readouterr().err
    # Of another size: Python keeps the compiled file of the same size and second.
    (work / "my_filter.py").write_text(stopping.replace("1 / 0", "not True"))
    assert tokenize(source, "out", "--filter", "my_filter:stop", *small) == 2
    assert "my_filter:stop as it was before its file changed" in capsys.readouterr().err
    # A finished one is compared by its options.
    assert tokenize(source, "other", "--filter", "my_filter:stop") == 0
    (work / "my_filter.py").write_text(stopping)
    assert tokenize(source, "other", "--filter", "my_filter:stop") == 2
    assert "a dataset of other options" in capsys.readouterr().err
    # Nor is a job without a filter continued with one.
    (work / "rows.jsonl").write_text((work / "rows.jsonl").read_text() + '{"text": 5}\n')
    assert tokenize(source, "plain", *small) == 2
    assert list((work / "plain/.units").glob("*.train.bin"))
    assert tokenize(source, "plain", "--filter", "my_filter:keep", *small) == 2
    assert "was started with no filter" in capsys.readouterr().err
