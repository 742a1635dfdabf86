"""Every key of a row is used, refused, or named as not read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest
from pyarrow import Table, parquet

from bigtrain.cli import main
from bigtrain.data.documents.chat_formats import FORMATS, Conversations, document_in
from bigtrain.data.documents.exact_json import read_document
from bigtrain.data.documents.key_rules import KeyCounts, KeyRules, describe_unread, table_of_keys
from bigtrain.data.documents.row_keys import ROW_KEYS
from bigtrain.data.shards.manifest import read_manifest
from tests.support.chats import QWEN3, save_chat_tokenizer
from tests.unit.commands.test_tokenize_chat import documents_of

ROOT = Path(__file__).resolve().parents[4]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}]
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]
PAIR = {"prompt": "a ", "chosen": "good", "rejected": "bad"}
TEXT = {"text": "a b"}
MESSAGES = {"messages": CHAT}
TOKENS = {"input_ids": [5, 6, 7]}
ALPACA = {"instruction": "a", "output": "b"}


def read(name: str, row: dict[str, Any], ignored: tuple[str, ...] = (), **options: Any) -> Any:
    if name == "text":
        return document_in(row, ("text",), None, ignored)
    known = FORMATS[name]
    keys = options.pop("keys", known.keys)
    rules = Conversations(known, keys, ignored=ignored, **options)
    content, why = document_in(row, keys[:1], rules)
    return (None if content is None else read_document(content)), why


def test_every_key_of_a_format_is_in_the_table() -> None:
    """And no used key of the table is without a format that reads it."""
    listed = {
        (name, form)
        for e in ROW_KEYS
        if e.action == "used"
        for name in e.names
        for form in e.formats
    }
    read_keys = {(k, f.name) for f in FORMATS.values() for k in (*f.keys, *f.extra_keys)}
    assert listed == read_keys | {("text", "text")}
    for entry in ROW_KEYS:
        assert set(entry.formats) <= {*FORMATS, "text"}
        if entry.action == "refused":
            assert not listed & {(name, form) for name in entry.names for form in entry.formats}


def test_the_documentation_has_the_table() -> None:
    page = (ROOT / "docs/reference/row_keys.md").read_text(encoding="utf-8")
    for keys, formats, tools, _ in table_of_keys():
        assert f"| {keys} | {formats} | {tools} | " in page


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("text", {**TEXT, "weight": 0.5}, "its weight is 0.5, which only rows with input_ids"),
    ("text", {**TEXT, "weight": "0.5"}, "its weight is '0.5'"),
    ("text", {**TEXT, "weight": 0}, "its weight is 0, so nothing of it would be learned"),
    ("text", {**TEXT, "loss_weights": [1]}, "it has loss_weights"),
    ("text", {**TEXT, "input_ids": [1]}, "TRL would learn these tokens -> --format tokens"),
    ("preference", {**PAIR, "margin": 0.7}, "its margin is 0.7, which no objective reads"),
    ("preference", {**PAIR, "margin": 0}, "its margin is 0, which"),
    ("preference", {**PAIR, "ref_chosen_logps": -3.5}, "objective.reference"),
    ("preference", {**PAIR, "system": "s"}, "its system would not be read"),
    (
        "preference",
        {"instruction": "a", "input": "", "chosen": "b", "rejected": "c"},
        "its instruction would not be read -> --key prompt=instruction",
    ),
    ("preference", {**PAIR, "input": "more"}, "LLaMA-Factory joins to the instruction"),
    (
        "preference",
        {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {**TURNS[1], "value": "x"}},
        "--key prompt=conversations",
    ),
    ("messages", {**MESSAGES, "chat_template_kwargs": {"a": 1}}, "({'a': 1}) are not given to"),
    (
        "messages",
        {**MESSAGES, "rejected_response": "bad"},
        "--format preference --key chosen=messages --key rejected=rejected_response",
    ),
    (
        "sharegpt",
        {"conversations": TURNS, "kto_tag": False},
        "--format kto --key prompt=conversations --key label=kto_tag",
    ),
    ("messages", {**MESSAGES, "label": False}, "--format kto --key prompt=messages"),
    ("messages", {**MESSAGES, "input_ids": [1]}, "--format tokens"),
    (
        "messages",
        {**MESSAGES, "system_prompt": "s"},
        "--format sharegpt --key conversations=messages --key system=system_prompt",
    ),
    ("sharegpt", {"conversations": TURNS, "system_message": "s"}, "--key system=system_message"),
    ("preference", {**PAIR, "system_message": "s"}, "the first message of the prompt"),
    ("alpaca-chat", {**ALPACA, "system_prompt": "s"}, "--format alpaca --key system=system_prompt"),
    ("preference", {"input": "a", "chosen": "b", "rejected": "c"}, "--key prompt=input"),
    ("preference", {**PAIR, "context": "more"}, "its context would not be read -> one text under"),
    (
        "prompt-completion",
        {"prompt": "a", "completion": "b", "input": "c"},
        "one text under prompt",
    ),
    ("messages", {**MESSAGES, "train": False}, "its train is False, which is read in messages"),
    ("text", {**TEXT, "loss": False}, "its loss is False"),
    ("text", {**TEXT, "role": "Prompter"}, "it is one message of a conversation"),
    (
        "messages",
        {**MESSAGES, "chat_template_kwargs": {"a": 1}},
        "at its start, and --ignore-key chat_template_kwargs",
    ),
    ("messages", {**MESSAGES, "history": [["a", "b"]]}, "its history would not be read"),
    ("alpaca", {**ALPACA, "tools": "[{}]"}, "its tools would not be read"),
    ("sharegpt", {"conversations": TURNS, "objects": {"ref": []}}, "only text is supported"),
    ("tokens", {**TOKENS, "position_ids": [0, 0, 1]}, "several documents in one row"),
    ("tokens", {**TOKENS, "seq_lengths": [1, 2]}, "several documents in one row"),
    ("tokens", {**TOKENS, "token_type_ids": [0, 1, 1]}, "are not all 0"),
    ("tokens", {**TOKENS, "loss_scale": [0, 1, 2]}, "--key loss_weights=loss_scale"),
    ("tokens", {**TOKENS, "target_token_ids": [[1]]}, "objective.teacher"),
]


@pytest.mark.parametrize(("name", "row", "why"), REFUSED)
def test_a_key_that_changes_what_is_learned_is_refused(
    name: str, row: dict[str, Any], why: str
) -> None:
    content, reason = read(name, row)
    assert content is None
    assert why in reason


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("text", {**TEXT, "weight": 1.0, "loss_weights": None}),
        ("preference", {**PAIR, "margin": None, "system": "", "history": []}),
        ("messages", {**MESSAGES, "chat_template_kwargs": {}, "rejected_response": None}),
        ("messages", {**MESSAGES, "label": 3, "weight": 1}),
        ("tokens", {**TOKENS, "position_ids": [0, 1, 2], "seq_lengths": [3], "length": 3}),
        ("tokens", {**TOKENS, "token_type_ids": [0, 0, 0], "loss_scale": "[1, 1, 1]"}),
        ("tokens", {"input_ids": "[5, 6, 7]", "position_ids": "[0, 1, 2]"}),
        ("text", {**TEXT, "weight": "1"}),
        ("text", {**TEXT, "role": "doctor", "loss": 2.5}),
        ("messages", {**MESSAGES, "train": True, "loss": None}),
    ],
)
def test_values_that_change_nothing_are_accepted(name: str, row: dict[str, Any]) -> None:
    content, why = read(name, row)
    assert content is not None, why
    usual = {key: row[key] for key in row if key in FORMATS.get(name, FORMATS["messages"]).keys}
    assert content == read(name, usual if name != "text" else TEXT)[0]


def test_rules_travel_to_worker_processes() -> None:
    rules = Conversations(FORMATS["tokens"], FORMATS["tokens"].keys)
    assert rules.key_rules.refused
    copy = pickle.loads(pickle.dumps(rules)).key_rules
    assert copy.refused.keys() == rules.key_rules.refused.keys()
    assert copy.problem({"loss_scale": [2]}, {})


def test_ignored_keys_are_not_read() -> None:
    for name, row, _ in REFUSED:
        ignored = tuple(key for key in row if key in KeyRules(name, ()).refused)
        content, why = read(name, row, ignored)
        known = "have no common beginning" in why  # the prompt itself is ignored
        assert content is not None or known, (name, row, why)
    with_system = {**MESSAGES, "system": "s"}
    assert len(read("messages", with_system)[0]["messages"]) == 3
    assert read("messages", with_system, ("system",)) == read("messages", MESSAGES)


def test_unread_keys_are_counted_and_what_they_may_have_meant() -> None:
    counts = KeyCounts()
    for row in ({"text": 1, "wieght": 2, "url": 3}, {"text": 1, "url": 3}, {"text": 1, "label": 0}):
        counts.add(row)
    counts.add(("text", "Loss-Weights"), 40)
    rules = KeyRules("text", ("text",))
    unread = counts.unread(rules)
    assert unread == {"wieght": 1, "url": 2, "label": 1, "Loss-Weights": 40}
    assert describe_unread(unread, rules) == (
        "keys of rows that are not read: Loss-Weights (40 rows; loss_weights?), label (1 rows; "
        "--format classification or kto), wieght (1 rows; weight?), url (2 rows)"
    )
    chats = KeyRules("messages", ("data.messages", "tools"))
    assert not counts.unread(KeyRules("text", ("text",), tuple(unread)))
    assert [chats.reads(key) for key in ("data", "tools", "weight", "label", "tool")] == [
        *(True, True, True),
        *(False, False),
    ]
    many = KeyCounts()
    for number in range(10_000):
        many.add((f"k{number}", "text"))
    folded = many.unread(rules)
    assert sum(folded.values()) == 10_000
    assert len(folded) <= 1001


def test_system_prompts_of_a_row_and_a_turn() -> None:
    turns = [{"from": "system", "value": "S"}, *TURNS]
    for name, key, given in (
        ("sharegpt", "conversations", turns),
        ("messages", "messages", [{"role": "system", "content": "S"}, *CHAT]),
    ):
        one, _ = read(name, {key: given})
        assert read(name, {key: given, "system": "S"})[0] == one
        content, why = read(name, {key: given, "system": "T"})
        assert content is None
        assert "two system prompts" in why


def test_pairs_of_other_tools() -> None:
    """LLaMA-Factory's ranking, by its own names and by a mapping, and ms-swift's last answer."""
    expected, _ = read(
        "preference",
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{**CHAT[1], "content": "x"}]},
    )
    bad = {**TURNS[1], "value": "x"}
    row: dict[str, Any] = {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": bad}
    keys = ("chosen", "rejected", "conversations", "tools")
    assert read("preference", row, keys=keys)[0] == expected
    renamed = {
        key: [{"who": t["from"], "said": t["value"]} for t in ([v] if isinstance(v, dict) else v)]
        for key, v in row.items()
    }
    renamed["chosen"] = renamed["chosen"][0]  # type: ignore[assignment]
    assert read("preference", renamed, keys=keys, turn_keys=("who", "said"))[0] == expected
    as_text = {key: json.dumps(value) for key, value in row.items() if key != "chosen"}
    assert (
        read("preference", {**as_text, "chosen": json.dumps([TURNS[1]])}, keys=keys)[0] == expected
    )
    swift = {"messages": CHAT, "rejected_response": "x"}
    keys = ("messages", "rejected_response", "prompt", "tools")
    assert read("preference", swift, keys=keys)[0] == expected
    calls = [*CHAT[:1], {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    content, why = read("preference", {**swift, "messages": calls}, keys=keys)
    assert content is None
    assert "all text or all messages" in why


@pytest.mark.parametrize(
    ("label", "desirable"),
    [
        *((value, True) for value in (True, 1, 1.0, "1", "true", "TRUE", " True ")),
        *((value, False) for value in (False, 0, 0.0, "0", "false", "FALSE", "False")),
        *((value, None) for value in (None, 2, -1, 0.5, "yes", "", "01", [True])),
    ],
)
def test_labels_of_answers(label: object, desirable: bool | None) -> None:
    content, why = read("kto", {"prompt": "a", "completion": "b", "label": label})
    assert (content or {}).get("label") is desirable
    assert ("neither true nor false" in why) == (desirable is None)


def test_rated_conversations() -> None:
    expected, _ = read("kto", {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True})
    for key, given in (("messages", CHAT), ("conversations", TURNS)):
        keys = (key, "completion", "kto_tag", "tools")
        assert read("kto", {key: given, "kto_tag": 1}, keys=keys)[0] == expected
    content, why = read("kto", {"prompt": CHAT[:1], "label": True})
    assert content is None
    assert "does not end in an answer" in why


CALL = {"name": "f", "arguments": {"a": 1}}
SWIFT = [
    CHAT[0],
    {"role": "tool_call", "content": json.dumps(CALL)},
    {"role": "tool_call", "content": json.dumps({**CALL, "name": "g"})},
    {"role": "tool_response", "content": "r"},
    {"role": "tool_response", "content": "s"},
    CHAT[1],
]


def test_calls_that_are_messages() -> None:
    functions = [{"type": "function", "function": {**CALL, "name": name}} for name in "fg"]
    expected = [
        CHAT[0],
        {"role": "assistant", "tool_calls": functions},
        {"role": "tool", "content": "r"},
        {"role": "tool", "content": "s"},
        CHAT[1],
    ]
    assert read("messages", {"messages": SWIFT})[0]["messages"] == expected
    turns = [{"from": m["role"], "value": m["content"]} for m in SWIFT]
    assert read("sharegpt", {"conversations": turns})[0]["messages"] == expected
    # After words of the assistant, in the same message.
    spoken = [CHAT[0], {"role": "assistant", "content": "wait"}, *SWIFT[1:]]
    merged = read("messages", {"messages": spoken})[0]["messages"]
    assert merged == [CHAT[0], {**expected[1], "content": "wait"}, *expected[2:]]
    unlearned = [CHAT[0], {**CHAT[1], "loss": False}, *SWIFT[1:]]
    assert "only one of both has loss" in read("messages", {"messages": unlearned})[1]
    # The name of a role of one's own, and calls that are to be text.
    own = [{**m, "role": {"tool_call": "act"}.get(m["role"], m["role"])} for m in SWIFT]
    assert (
        read("messages", {"messages": own}, roles={"act": "tool_call"})[0]["messages"] == expected
    )
    plain = read("messages", {"messages": SWIFT}, roles={"tool_call": "assistant"})[0]["messages"]
    assert plain[1] == {"role": "assistant", "content": json.dumps(CALL)}
    wrong = [CHAT[0], {"role": "tool_call", "content": "f(1)"}]
    assert (
        "message 2 has the role tool_call and not JSON" in read("messages", {"messages": wrong})[1]
    )


def run(*words: object) -> int:
    return main([*map(str, words)])


@pytest.mark.parametrize("kind", ["json", "parquet", "csv"])
def test_a_job_names_the_keys_that_it_does_not_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", QWEN3)
    source, out = tmp_path / f"rows.{kind}", tmp_path / "out"

    def write(rows: list[dict[str, Any]]) -> None:
        if kind == "json":
            source.write_text(json.dumps(rows))

        elif kind == "parquet":
            parquet.write_table(Table.from_pylist(rows), source)
        else:
            lines = [
                ",".join(map(str, values)) for values in (rows[0], *(r.values() for r in rows))
            ]
            source.write_text("\n".join(lines) + "\n")

    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", out]
    write([{"text": f"t{n}", "url": "x", "wieght": 2} for n in range(7)])
    assert run(*words, "--workers", 1) == 0
    assert read_manifest(out).unread_keys == {"url": 7, "wieght": 7}
    named = "keys of rows that are not read: wieght (7 rows; weight?), url (7 rows)"
    assert [r.getMessage() for r in caplog.records if "not read" in r.getMessage()] == [named]
    assert run("inspect", out) == 0
    assert "not read: url (7), wieght (7)" in capsys.readouterr().out
    write([{"text": f"t{n}", "weight": 0.5 if kind != "csv" else 1} for n in range(7)])
    words[-1] = tmp_path / "weighted"
    assert run(*words) == (0 if kind == "csv" else 2)
    if kind != "csv":
        assert "its weight is 0.5" in capsys.readouterr().err
        assert run(*words, "--ignore-key", "weight") == 0
        manifest = read_manifest(tmp_path / "weighted")
        assert (manifest.unread_keys, manifest.options.ignored_keys) == (None, ("weight",))


def test_rows_with_a_long_prompt_are_dropped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", QWEN3)
    source, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    rows = [{**PAIR, "prompt": "word " * number} for number in range(1, 21)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output"]
    assert run(*words, out) == 0
    prompts = [mask.index(1) for _, mask in documents_of(out, "train")][::2]
    limit = prompts[9]
    kept = sum(prompt <= limit for prompt in prompts)
    assert 0 < kept < 20
    assert run(*words, tmp_path / "short", "--max-prompt-tokens", limit) == 0
    manifest = read_manifest(tmp_path / "short")
    assert manifest.num_documents("train") == 2 * kept
    assert sum((manifest.filtered or {}).values()) == 20 - kept
    assert documents_of(tmp_path / "short", "train") == documents_of(out, "train")[: 2 * kept]
    assert f"{20 - kept} rows dropped, whose prompt has more than {limit} tokens" in (
        capsys.readouterr().out
    )


def test_ambiguous_pairs_name_one_remedy_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", QWEN3)
    row = {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {**TURNS[1], "value": "x"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = ["tokenize", "--input", tmp_path / "rows.jsonl", "--tokenizer", tokenizer]
    assert run(*words, "--output", tmp_path / "out") == 2
    assert (
        "--format sharegpt, or --format preference --key prompt=conversations\n"
        in capsys.readouterr().err
    )
    remedy = ["--format", "preference", "--key", "prompt=conversations"]
    assert run(*words, "--output", tmp_path / "out", *remedy) == 0
    assert run(*words, "--output", tmp_path / "no", "--ignore-key", "conversations") == 2


def test_the_first_refused_key_is_that_of_the_table_in_any_row() -> None:
    """So that the remedy for the instruction comes before that for the input."""
    row = {"input": "a", "instruction": "b", "chosen": "c", "rejected": "d"}
    for names in (list(row), list(row)[::-1]):
        assert "--key prompt=instruction" in read("preference", {n: row[n] for n in names})[1]


def test_a_path_below_a_refused_key_is_read() -> None:
    row = {
        "input": {"messages": CHAT[:1]},
        "chosen": CHAT[1:],
        "rejected": [{**CHAT[1], "content": "x"}],
    }
    keys = ("chosen", "rejected", "input.messages", "tools")
    content, why = read("preference", row, keys=keys)
    assert content is not None, why
    assert KeyRules("preference", keys).reads("input")


def test_a_key_that_may_be_refused_is_no_hint_to_itself() -> None:
    assert KeyRules("text", ("text",)).meaning("role") == ""
    assert KeyRules("text", ("text",)).meaning("Weight") == "weight?"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_keys_of_an_object_of_which_a_path_is_read_are_named(form: str, tmp_path: Path) -> None:
    """Each by its path, as are keys of other objects below; the rest of the row as before."""
    meta = {"text": "a b", "title": "t", "more": {"page": 1, "next": "x"}}
    rows = [{"meta": meta, "url": {"host": "h"}, "id": 7}] * 3
    source = tmp_path / f"rows.{form}"
    if form == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "parquet":
        parquet.write_table(Table.from_pylist(rows), source)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(source)
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", QWEN3)
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--workers", "1"]
    for keys, unread in (
        ("meta.text", {"meta.title": 3, "meta.more": 3, "url": 3, "id": 3}),
        ("meta.text,meta.more.next", {"meta.title": 3, "meta.more.page": 3, "url": 3, "id": 3}),
    ):
        out = tmp_path / keys
        assert run(*words, "--text-key", keys, "--output", out) == 0
        assert read_manifest(out).unread_keys == unread
