"""`bigtrain tokenize` of the same conversations in every format: the same tokens and masks."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from bigtrain.cli import main
from tests.support.chats import CHATML, save_chat_tokenizer, turns

PAIRS = [("Who are you?", "A model."), ("Add them.\n1 2", "3")]
MESSAGES = turns(*(text for pair in PAIRS for text in pair))
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "sharegpt": {
        "conversations": [
            {"from": speaker, "value": text}
            for pair in PAIRS
            for speaker, text in zip(("human", "gpt"), pair, strict=True)
        ]
    },
    "alpaca": {
        "instruction": "Add them.",
        "input": "1 2",
        "output": "3",
        "history": [list(PAIRS[0])],
    },
    "prompt-completion": {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def tokenized(row: Any, kind: str, tokenizer: Path, place: Path, *options: str) -> tuple[Any, Any]:
    place.mkdir()
    file = place / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(row) + "\n")
    else:
        parquet.write_table(pa.Table.from_pylist([row]), file)
    words = ["tokenize", "--input", str(file), "--tokenizer", str(tokenizer)]
    assert main([*words, "--output", str(place / "out"), *options]) == 0
    tokens = np.fromfile(place / "out/train-00000.bin", np.uint16)
    mask = np.fromfile(place / "out/train-00000.mask", np.uint8)
    return tokens, np.unpackbits(mask, bitorder="little", count=len(tokens))


def test_a_named_pipe_is_read_once(tokenizer: Path, tmp_path: Path) -> None:
    """Its first row cannot be looked at: what was read of it would be lost."""
    rows = {
        "text": ([{"text": f"a document of number {number} " * 9} for number in range(600)], ()),
        "sharegpt": ([ROWS["sharegpt"]] * 300, ("--format", "sharegpt")),
    }
    for name, (documents, options) in rows.items():
        content = "".join(json.dumps(row) + "\n" for row in documents)
        tokens = []
        for place in (tmp_path / f"{name} file", tmp_path / f"{name} pipe"):
            place.mkdir()
            file = place / "in.jsonl"
            if place.name.endswith("pipe"):
                os.mkfifo(file)
                Thread(target=file.write_text, args=[content], daemon=True).start()
            else:
                file.write_text(content)
            words = ["tokenize", "--input", str(file), "--tokenizer", str(tokenizer)]
            words += ["--output", str(place / "out"), "--workers", "1", *options]
            assert main(words) == 0
            tokens.append((place / "out/train-00000.bin").read_bytes())
        assert tokens[0] == tokens[1], name


def test_every_format_gives_the_same(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "jsonl"
    wanted, mask = tokenized(ROWS["messages"], kind, tokenizer, tmp_path / "0", "--workers", "1")
    for number, (name, row) in enumerate(ROWS.items(), 1):
        tokens_and_mask = tokenized(row, kind, tokenizer, tmp_path / str(number), "--workers", "1")
        assert f"match --format {name}" in capsys.readouterr().err
        assert np.array_equal(tokens_and_mask[0], wanted), name
        if name == "prompt-completion":
            last = tokenized(
                ROWS["messages"], kind, tokenizer, tmp_path / "last", "--learn", "last"
            )
            assert np.array_equal(tokens_and_mask[1], last[1])
            assert 0 < last[1].sum() < mask.sum()
        else:
            assert np.array_equal(tokens_and_mask[1], mask), name


def test_other_names_of_keys(tokenizer: Path, tmp_path: Path) -> None:
    wanted, _ = tokenized(ROWS["alpaca"], "jsonl", tokenizer, tmp_path / "0")
    names = {"instruction": "question", "output": "answer"}
    row = {names.get(key, key): value for key, value in ROWS["alpaca"].items()}
    mapping = [word for name, key in names.items() for word in ("--key", f"{name}={key}")]
    tokens, _ = tokenized(row, "jsonl", tokenizer, tmp_path / "1", "--format", "alpaca", *mapping)
    assert np.array_equal(tokens, wanted)
    names = {"user": "customer", "assistant": "agent"}
    talk = [{"speaker": names[m["role"]], "said": m["content"]} for m in MESSAGES]
    mapping = ["--key", "from=speaker", "--key", "value=said", "--key", "conversations=talk"]
    mapping += ["--role", "customer=user", "--role", "agent=assistant", "--format", "sharegpt"]
    tokens, _ = tokenized({"talk": talk}, "parquet", tokenizer, tmp_path / "2", *mapping)
    assert np.array_equal(tokens, wanted)


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        (ROWS["sharegpt"], ("--format", "messages"), "rows.jsonl:1: .*-> --format sharegpt"),
        (ROWS["messages"], ("--key", "messages"), "not NAME=KEY"),
        (ROWS["messages"], ("--key", "text=a"), "no such key -> messages, tools, role, content"),
        (ROWS["messages"], ("--role", "a"), "--role a: not NAME=ROLE, such as customer=user"),
        (ROWS["alpaca"], ("--role", "a=user"), "rows of --format alpaca have no roles"),
        ({"text": "a"}, ("--role", "a=user"), "--role is for conv.* first row has the keys text"),
        ({"text": "a"}, ("--key", "messages=a"), "--text-key for text"),
        (
            {"dialog": [], "score": math.nan},
            ("--learn", "last"),
            "--learn is for .* keys dialog, score -> --format sharegpt --key conversations=dial",
        ),
        (ROWS["alpaca"], ("--format", "alpaca", "--chat-key", "x"), "--format is alpaca -> --key"),
    ],
)
def test_what_is_refused(
    row: Any,
    options: tuple[str, ...],
    words: str,
    tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    base = ["tokenize", "--input", str(file), "--tokenizer", str(tokenizer)]
    assert main([*base, "--output", str(tmp_path / "out"), *options]) != 0
    assert re.search(words, capsys.readouterr().err)


MIXED = [ROWS["messages"], {"prompt": "a", "completion": "b"}, {"text": "c"}]


@pytest.mark.parametrize("options", [(), ("--format", "prompt-completion"), ("--format", "text")])
def test_rows_of_several_formats_are_refused_with_a_way_out(
    options: tuple[str, ...], tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever format is asked for: the fix named is not the format that the other rows lack."""
    together = tmp_path / "all.jsonl"
    together.write_text("".join(json.dumps(row) + "\n" for row in MIXED))
    apart = tmp_path / "apart"
    apart.mkdir()
    for number, row in enumerate(MIXED):
        (apart / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
    for place in (together, apart):
        base = ["tokenize", "--input", str(place), "--tokenizer", str(tokenizer)]
        assert main([*base, "--output", str(tmp_path / "out"), *options]) == 2
        error = capsys.readouterr().err
        assert "each into its own --output, and mixed in the run: data.sources" in error
    if not options:
        assert re.search("messages: .*0.jsonl; prompt-completion: .*1.jsonl; text: ", error)


def test_a_template_without_tool_calls_is_named_as_the_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leaving such conversations out is no fix: there may be no others."""
    save_chat_tokenizer(tmp_path / "t", CHATML)
    file = tmp_path / "calls.jsonl"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    file.write_text(json.dumps({"messages": messages}) + "\n")
    base = ["tokenize", "--input", str(file), "--tokenizer", str(tmp_path / "t")]
    assert main([*base, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "calls.jsonl:1: the chat template refuses it: UndefinedError" in error
    assert (
        "does not support tool calls -> use a template for such messages: --chat-template" in error
    )
    assert "--skip-bad" not in error
