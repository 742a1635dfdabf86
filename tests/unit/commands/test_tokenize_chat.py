"""`bigtrain tokenize --chat-key`: conversations from files to tokens and masks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import AddedToken

from bigtrain.cli import main
from bigtrain.data.chat.encoder import ChatEncoder
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.shards.verification import corrupt_files
from tests.support.chats import CHATML, chat_tokenizer, save_chat_tokenizer, turns, unmarked
from tests.support.datasets import open_verified

CHATS = [turns(f"What is {n} + {n}?", f"It is {2 * n}." + " é🙂" * (n % 3)) for n in range(60)] + [
    turns("Hi", "Hello!", "a < b", "<|im_end|>", system="Be brief.")
]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in CHATS])


def tokenize(*arguments: object) -> int:
    return main(["tokenize", "--chat-key", "messages", *map(str, arguments)])


def documents_of(path: Path, split: Any = "train") -> list[tuple[list[int], list[int]]]:
    documents = []
    for shard in open_verified(path).shards(split):
        mask = np.unpackbits(shard.mask_bytes, bitorder="little", count=shard.num_tokens)
        begin = 0
        for length in shard.sequence_lengths.tolist():
            tokens = shard.tokens[begin : begin + length].tolist()
            documents.append((tokens, mask[begin : begin + length].tolist()))
            begin += length
    return documents


@cache
def transformers_tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def expected(messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    result = transformers_tokenizer().apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return result["input_ids"], result["assistant_masks"]


def errors_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "errors.jsonl").read_text().splitlines()]


def test_tokens_and_masks(
    source: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize("--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "d") == 0
    assert "% of the tokens to learn" in capsys.readouterr().out
    documents = documents_of(tmp_path / "d")
    assert documents[:-1] == [expected(messages) for messages in CHATS[:-1]]
    # The last one spells a control token, which stays text.
    assert len(documents[-1][0]) > len(expected(CHATS[-1])[0])
    manifest = read_manifest(tmp_path / "d")
    assert manifest.is_masked
    assert manifest.options.chat
    assert manifest.options.text_keys == ("messages",)
    assert corrupt_files(tmp_path / "d") == []
    (tmp_path / "d" / "train-00000.mask").unlink()
    assert "train-00000.mask cannot be read" in corrupt_files(tmp_path / "d")[0]


@pytest.mark.parametrize(
    "form",
    [
        *("parquet", "strings", "saved"),
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("arrow", "json")),
    ],
)
def test_every_way_to_read_gives_the_same(
    source: Path, tokenizer: Path, tmp_path: Path, form: str
) -> None:
    assert tokenize("--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "d") == 0
    rows = [{"messages": messages, "other": 1} for messages in CHATS]
    if form == "strings":
        rows = [{"messages": json.dumps(messages), "other": 1} for messages in CHATS]
        source = tmp_path / "chats.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    elif form == "parquet":
        source = tmp_path / "chats.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), source, row_group_size=7)
    elif form == "arrow":
        source = tmp_path / "chats.arrow"
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_file(source, table.schema) as writer:
            writer.write_table(table)
    elif form == "json":
        source = tmp_path / "chats.json"
        source.write_text(json.dumps(rows))
    else:
        from datasets import Dataset

        source = tmp_path / "saved"
        Dataset.from_list(rows).save_to_disk(source)
    assert tokenize("--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "e") == 0
    assert documents_of(tmp_path / "e") == documents_of(tmp_path / "d")


def test_masks_move_with_their_shards(
    source: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when all units are done and some files have moved: the next start goes on."""
    command = ["--input", source, "--tokenizer", tokenizer, "--shard-size", 3000]
    assert tokenize(*command, "--output", tmp_path / "whole") == 0
    moved: list[str] = []
    rename = Path.rename

    def move(origin: Path, target: Path) -> Path:
        if target.name.startswith("train-"):
            if len(moved) == 4:
                raise KeyboardInterrupt
            moved.append(target.name)
        return rename(origin, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", move)
        with pytest.raises(KeyboardInterrupt):
            tokenize(*command, "--output", tmp_path / "d")
    assert moved[:3] == ["train-00000.bin", "train-00000.idx", "train-00000.mask"]
    with monkeypatch.context() as patched:
        patched.setattr(ChatEncoder, "encode", None)  # nothing is encoded again
        assert tokenize(*command, "--output", tmp_path / "d") == 0
    contents_by_file, wanted = (
        {path.name: path.read_bytes() for path in folder.glob("train-*")}
        for folder in (tmp_path / "d", tmp_path / "whole")
    )
    assert contents_by_file == wanted
    assert len(wanted) >= 9


BAD: list[Any] = [
    {"messages": turns("a", "b")},
    {"messages": [{"role": "user", "content": "no answer"}]},
    {"messages": "hello"},
    {"texts": 1},
    {"messages": [{"from": "human", "value": "a"}]},
    {"messages": [*turns("a"), {"role": "assistant", "tool_calls": [{"type": "function"}]}]},
    {"messages": turns("c", "d")},
]
REASONS = [
    (2, "no assistant tokens to train on"),
    (3, "'messages' is not a conversation: not a list of messages but str"),
    (4, "no key 'messages'; keys here: texts"),
    (5, "'messages' is not a conversation: message 1 has no role that is text; keys here: from"),
    (6, "the chat template refuses it: UndefinedError: "),
]


def test_bad_conversations_are_listed(tokenizer: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "bad.jsonl", BAD)
    command = ["--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "d"]
    assert tokenize(*command, "--skip-bad") == 0
    assert documents_of(tmp_path / "d") == [expected(BAD[n]["messages"]) for n in (0, 6)]
    listed = errors_of(tmp_path / "d")
    assert [entry["line"] for entry in listed] == [line for line, _ in REASONS]
    for entry, (_, reason) in zip(listed, REASONS, strict=True):
        assert entry["reason"].startswith(reason)
    assert read_manifest(tmp_path / "d").skipped_documents == len(REASONS)


@pytest.mark.parametrize(("bad", "size"), [(1, 150), (4, 10_000)])
def test_one_bad_conversation_ends_it(
    tokenizer: Path, tmp_path: Path, bad: int, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": turns("a", "b")}] * 5 + [BAD[bad]] + [{"messages": turns("a", "b")}] * 3
    source = write_lines(tmp_path / "bad.jsonl", rows)
    command = ["--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "d"]
    assert tokenize(*command, "--shard-size", size) == 2
    assert f"bad.jsonl:6: {dict(REASONS)[bad + 1]}" in capsys.readouterr().err


def test_rows_of_bad_conversations(tokenizer: Path, tmp_path: Path) -> None:
    silent = {"messages": [{"role": "user", "content": "no answer"}]}
    rows = [{"messages": turns("a", "b")}, silent, {"messages": turns("c", "d")}, silent]
    source = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    command = ["--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "d"]
    assert tokenize(*command, "--skip-bad") == 0
    listed = errors_of(tmp_path / "d")
    assert [entry["row"] for entry in listed] == [1, 3]


def test_another_template_is_another_dataset(
    source: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "d"
    command = ["--input", source, "--tokenizer", tokenizer, "--output", output]
    assert tokenize(*command) == 0
    assert tokenize(*command) == 0
    assert "is already the finished dataset" in capsys.readouterr().out
    template = tmp_path / "other.jinja"
    template.write_text(unmarked(CHATML).replace("\n", "\r\n"))
    assert tokenize(*command, "--chat-template", template) == 2
    assert (
        "contains a dataset of other chat template; nothing was written" in capsys.readouterr().err
    )
    command[-1] = tmp_path / "e"
    assert tokenize(*command, "--chat-template", template) == 0
    from transformers import AutoTokenizer

    kept = AutoTokenizer.from_pretrained(tmp_path / "e" / "tokenizer")
    assert kept.chat_template == template.read_text()
    assert documents_of(tmp_path / "e")[0][0] == kept.apply_chat_template(CHATS[0])["input_ids"]
    first, second = (read_manifest(path) for path in (output, tmp_path / "e"))
    assert first.tokenizer.chat_template != second.tokenizer.chat_template


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        ("messages", ["--text-key", "a"], "--text-key and --chat-key messages exclude each other"),
        ("messages", ["--input", "IN.txt"], "IN.txt is text, and --chat-key names a key of it -> "),
        ("messages", ["--chat-template", "none.jinja"], "none.jinja cannot be read: "),
        (
            None,
            ["--format", "text", "--chat-template", "x.jinja"],
            "--chat-template is for conversations, and the first row has the keys ",
        ),
    ],
)
def test_options_that_do_not_fit(
    source: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str | None,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("IN.txt").write_text("text")
    command = ["tokenize", "--input", str(source), "--tokenizer", str(tokenizer), "--output", "d"]
    assert main([*command, *(["--chat-key", key] if key else []), *options]) == 2
    assert message in capsys.readouterr().err
    assert not Path("d").exists()


def test_inspect_shows_what_is_learned(
    source: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The marked text of a document is what transformers marks; in HTML as on the terminal."""
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert tokenize("--input", source, "--tokenizer", tokenizer, "--output", out) == 0
    capsys.readouterr()
    number = len(CHATS) - 1
    show = ["inspect", str(out), "--mask", "--document", str(number), "--html", str(page)]
    assert main(show) == 0
    shown = capsys.readouterr().out
    assert "\u27e6Hello!\u2039<|im_end|>\u203a\u27e7" in shown
    # The answer is the text of a control token.
    assert "\u27e6<|im_end|>\u2039<|im_end|>\u203a\u27e7" in shown
    assert "user\na < b\u2039<|im_end|>\u203a" in shown
    assert shown.count("\u27e6") == 2
    html = page.read_text()
    assert "<mark>Hello!<b>&lt;|im_end|&gt;</b></mark>" in html
    assert "<mark>&lt;|im_end|&gt;<b>&lt;|im_end|&gt;</b></mark>" in html
    assert "user\na &lt; b<b>&lt;|im_end|&gt;</b>" in html
    assert html.count("<mark>") == 3  # one in the legend
    assert main([*show, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    (document,) = tree["documents"]
    tokens, mask = expected(CHATS[0])
    assert main(["inspect", str(out), "--mask", "--json"]) == 0
    (first,) = json.loads(capsys.readouterr().out)["documents"]
    flags = [run["is_learned"] for run in first["runs"] for _ in range(run["num_tokens"])]
    assert (first["tokens"], flags) == (tokens, [bool(bit) for bit in mask])
    assert "".join(run["text"] for run in document["runs"]) == document["text"]
    assert main([*show[:-1], str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_inspect_shows_weights(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In JSON the factor of each run, for people those other than 1."""
    messages = turns("a", "b", "c", "d", "e", "f")
    for number, weight in ((1, 0.25), (3, 0)):
        messages[number]["weight"] = weight
    source = write_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    out, page = tmp_path / "out", tmp_path / "page.html"
    assert tokenize("--input", source, "--tokenizer", tokenizer, "--output", out) == 0
    capsys.readouterr()
    assert main(["inspect", str(out), "--mask", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "\u27e60.25\u00d7 b\u2039<|im_end|>\u203a\u27e7" in shown
    assert "d\u2039<|im_end|>\u203a\n\u2039<|im_start|>\u203auser" in shown
    assert "\u27e6f\u2039<|im_end|>\u203a\u27e7" in shown
    assert "tokens of these are learned; control tokens are between" in shown
    assert "<mark><small>0.25\u00d7 </small>b<b>" in page.read_text()
    assert main(["inspect", str(out), "--mask", "--json"]) == 0
    [document] = json.loads(capsys.readouterr().out)["documents"]
    runs = document["runs"]
    assert [run["weight"] for run in runs] == [0, 0.25, 0, 1, 0]
    assert [run["is_learned"] for run in runs] == [False, True, False, True, False]
    for run in runs:
        assert {run["text"][a:b] for a, b in run["control"]} <= {"<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize(
    ("row", "options", "is_counted"),
    [
        ({"text": "<|im_start|>user\nx<|im_end|>"}, ["--fim-rate", "0.5"], True),
        ({"text": "<|im_start|>user\nx<|im_end|>"}, ["--parse-special-tokens"], False),
        ({"text": "<| im_start|> and <im_end>"}, [], False),
        ({"prompt": "<|im_start|>user\nx", "completion": "y<|im_end|>"}, [], True),
        ({"messages": turns("<|im_start|>user\nx", "y<|im_end|>")}, [], True),
        ({"messages": turns("<|im_start|>", "<|im_end|>")}, ["--parse-special-tokens"], False),
    ],
)
def test_control_tokens_that_texts_spell_are_counted_and_named(
    row: dict[str, Any],
    options: list[str],
    is_counted: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three rows, one of which spells only one: letters, unless the option says otherwise."""
    last = json.loads(json.dumps(row).replace("<|im_end|>", "."))
    source = write_lines(tmp_path / "in.jsonl", [row, row, last])
    tokenizer, out = save_fim_tokenizer(tmp_path / "t"), tmp_path / "out"
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", out, *options]
    line = (
        "  letters:  texts spell control tokens, which were encoded as letters: <|im_start|> (3), "
        "<|im_end|> (2) -> to encode them as control tokens: --parse-special-tokens"
    )
    for words in (command, ["inspect", out]):
        assert main([*map(str, words)]) == 0
        output = capsys.readouterr().out
        assert (line in output.splitlines()) == is_counted
        assert output.count("\n  letters:") == is_counted
    spelled = {"<|im_start|>": 3, "<|im_end|>": 2}
    assert read_manifest(out).spelled_tokens == (spelled if is_counted else None)


def save_fim_tokenizer(directory: Path) -> Path:
    tokenizer = chat_tokenizer(CHATML)
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save_pretrained(str(directory))
    return directory
