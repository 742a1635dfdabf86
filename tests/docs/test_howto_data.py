"""What the pages on your own data and on object stores tell people to type is typed here."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bigtrain.cli import main
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.settings.loading import load_run_config
from bigtrain.system.storage.copies import fetched_copy
from tests.support.chats import chat_tokenizer, save_chat_tokenizer, turns
from tests.support.pages import page_text
from tests.support.remote_servers import S3_VARIABLES, WebServer, s3_server


def commands(page: str) -> list[str]:
    text = page_text(f"docs/howto/{page}.md")
    (block,) = re.findall(r"^```\n(.*?)^```", text, flags=re.M | re.S)
    return block.splitlines()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    fetched_copy.cache_clear()
    chat_tokenizer(None).save_pretrained("tokenizer")
    return tmp_path


def test_your_own_data(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_chat_tokenizer(work / "chat-tokenizer")
    texts = [f"{'word ' * (number % 7)}{number}" for number in range(30)]
    chats = [{"messages": turns("a?", text, "and?", "no.")} for text in texts]
    (work / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    support = [
        {"conversations": [{"from": "customer", "value": "a?"}, {"from": "agent", "value": text}]}
        for text in texts
    ]
    (work / "support.json").write_text(json.dumps(support, indent=1))
    with (work / "questions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "answer"], *(["a?", text] for text in texts)])
    parquet.write_table(pa.table({"prompt": texts, "completion": texts}), "pairs.parquet")
    pages = [{"meta": {"text": text, "page": 1}} for text in texts]
    parquet.write_table(pa.Table.from_pylist(pages), "pages.parquet")
    ids = [{"input_ids": [7, number + 8, 9], "labels": [-100, -100, 9]} for number in range(30)]
    parquet.write_table(pa.Table.from_pylist(ids), "rows.parquet")
    code = [f"def f():\n    return {number}\n" for number in range(30)]
    (work / "code.jsonl").write_text("".join(json.dumps({"text": c}) + "\n" for c in code))
    (filter_source,) = re.findall(
        r"^```python\n(.*?)^```", page_text("docs/howto/your_data.md"), flags=re.M | re.S
    )
    (work / "my_filters.py").write_text(filter_source)
    monkeypatch.setattr(sys, "path", list(sys.path))
    asked = turns("a?")
    with (work / "preferences.jsonl").open("w") as file:
        for text in texts:
            answers = {"chosen": turns("a?", f"{text}.")[1:], "rejected": turns("a?", "no")[1:]}
            file.write(json.dumps({"prompt": asked, **answers}) + "\n")
    with (work / "rated.jsonl").open("w") as file:
        for text in texts:
            row = {"prompt": asked, "completion": turns("a?", text)[1:], "thumbs_up": "3" in text}
            file.write(json.dumps(row) + "\n")
    with (work / "reviews.jsonl").open("w") as file:
        for text in texts:
            label: int | str = 1 if "3" in text else "negative"
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (work / "more.jsonl.gz").write_bytes(gzip.compress(lines))
    before = os.dup(0)
    try:
        for command in commands("your_data"):
            if command.startswith("zcat more.jsonl.gz | "):
                command = command.removeprefix("zcat more.jsonl.gz | ")
                (work / "more.jsonl").write_bytes(lines)
                with (work / "more.jsonl").open("rb") as file_of_lines:
                    os.dup2(file_of_lines.fileno(), 0)
            assert main(shlex.split(command)[1:]) == 0, command
    finally:
        os.dup2(before, 0)
        os.close(before)
    for name in (
        "chats",
        "support",
        "questions",
        "pairs",
        "pages",
        "rows",
        "preferences",
        "rated",
        "reviews",
        "code",
        "more",
    ):
        manifest = read_manifest(work / name)
        assert manifest.num_documents("train") == len(texts) * (1 + (name == "preferences")), name
        assert manifest.is_masked == (name not in ("pages", "code", "more"))
    said = capsys.readouterr()
    assert main(["inspect", "reviews", "--document", "0"]) == 0
    assert "document 0 (label " in capsys.readouterr().out
    short = sum(len(text) < 3 for text in texts)
    filtered = read_manifest(work / "filtered")
    assert filtered.filtered == {"too short": short}
    assert filtered.num_documents("train") == len(texts) - short > 0
    for name in ("messages", "sharegpt", "prompt-completion", "tokens", "preference"):
        assert f"match --format {name}" in said.err


def test_object_stores(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = work / "server/bucket"
    (bucket / "texts").mkdir(parents=True)
    (work / "tokenizer").rename(bucket / "tokenizer")
    lines = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(9)).encode()
    (bucket / "texts/a.jsonl").write_bytes(lines)
    (work / "server/more.jsonl.gz").write_bytes(gzip.compress(lines))
    (bucket / "runs/mine").mkdir(parents=True)
    (bucket / "runs/mine/run_id").write_text("x")
    with ExitStack() as stack:
        port = stack.enter_context(s3_server(work / "server"))
        for name, value in {**S3_VARIABLES, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
            monkeypatch.setenv(name, value)
        web = stack.enter_context(WebServer(work / "server").running())
        for command in commands("object_stores"):
            words = shlex.split(command.replace("https://host/", f"http://127.0.0.1:{web}/"))
            if words[1] == "check":  # of the quickstart's own shards, which are not here
                assert load_run_config("quickstart", words[4:]).output.copy_to
                continue
            assert main(words[1:]) == 0, command
    assert read_manifest(work / "shards").num_documents("train") == 9
    manifest = read_manifest(work / "more")
    assert manifest.num_documents("train") == 18
    assert manifest.tokenizer.name == "s3://bucket/tokenizer/"
    assert (work / "runs/mine/run_id").read_text() == "x"
