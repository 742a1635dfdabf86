"""Preference pairs and labeled answers: tokens and masks of TRL's trainers, and bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from pyarrow import Table, parquet

from bigtrain.cli import main
from bigtrain.data.chat.preferences import encode_rows, without_long_prompts
from bigtrain.data.documents.chat_formats import FORMATS, Conversations, document_in, nearest
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.shards.verification import corrupt_files
from bigtrain.objectives.rows import Rows
from tests.support.chats import CHATML, LLAMA3, save_chat_tokenizer, turns
from tests.support.run_trees import llama, run_tree
from tests.unit.commands.test_tokenize_chat import documents_of
from tests.unit.data.chat.test_trl import encoder_of, tokenizer_of

USER, GOOD, BAD = (
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": "It is 3."},
    {"role": "assistant", "content": "It is 4, é🙂."},
)
SYSTEM = {"role": "system", "content": "Be short."}
EARLIER = [USER, BAD, {"role": "user", "content": "No. Again."}]


def document(name: str, row: dict[str, Any]) -> tuple[bytes | None, str]:
    known = FORMATS[name]
    return document_in(row, known.keys[:1], Conversations(known, known.keys))


def encoded(encoder: Any, name: Rows, row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    content, why = document(name, row)
    assert content is not None, why
    chats = encode_rows(encoder, [content], None, name).chats
    assert not chats.problems
    parts, begin = [], 0
    for length in chats.lengths.tolist():
        own = slice(begin, begin + length)
        parts.append((chats.tokens[own].tolist(), chats.mask[own].astype(int).tolist()))
        begin += length
    return parts


def by_trl(kind: str, tokenizer: Any, row: dict[str, Any]) -> dict[str, list[int]]:
    from datasets import Dataset
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    trainer: Any = DPOTrainer if kind == "dpo" else KTOTrainer
    own = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=False)
    options = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    rows = Dataset.from_list([row])
    tokens_by_column: dict[str, list[int]] = trainer._prepare_dataset(
        own, rows, tokenizer, options, "train"
    )[0]
    return tokens_by_column


PAIRS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "What is 2 + 2?\n", "chosen": "It is 4.", "rejected": "It is 5, é."},
    "over the boundary": {"prompt": "The quick bro", "chosen": "wn fox", "rejected": "ken fox"},
    "no prompt text": {"prompt": "", "chosen": "Paris.", "rejected": "Rome."},
    "implicit text": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "implicit text, one longer": {"chosen": "The sky is", "rejected": "The sky is green."},
    "messages": {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]},
    "implicit messages": {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
    "earlier answers": {"chosen": [*EARLIER, GOOD], "rejected": [*EARLIER, BAD]},
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("with_begin", [True, False], ids=["with begin", "plain"])
def test_a_pair_has_trls_tokens_and_learns_its_completions(name: str, with_begin: bool) -> None:
    row = PAIRS[name]
    is_text = isinstance(row["chosen"], str)
    tokenizer = tokenizer_of(None if is_text else LLAMA3, with_begin)
    encoder = encoder_of(None if is_text else LLAMA3, with_begin)
    near = nearest(row)
    assert near is not None
    assert near.name == "preference"
    wanted = by_trl("dpo", tokenizer, row)
    parts = encoded(encoder, "preference", row)
    for side, (tokens, mask) in zip(("chosen", "rejected"), parts, strict=True):
        assert tokens == [*wanted["prompt_ids"], *wanted[f"{side}_ids"]]
        learned = [0] * len(wanted["prompt_ids"]) + [1] * len(wanted[f"{side}_ids"])
        assert mask == learned


@pytest.mark.parametrize("label", [True, False, "true", "False"])
def test_a_labeled_answer_has_trls_tokens(label: Any) -> None:
    for template, prompt, completion in (
        (None, "What is 2 + 2?\n", "It is 4."),
        (LLAMA3, [SYSTEM, USER], [GOOD]),
    ):
        row = {"prompt": prompt, "completion": completion, "label": label}
        wanted = by_trl("kto", tokenizer_of(template), {**row, "label": True})
        ((tokens, mask),) = encoded(encoder_of(template), "kto", row)
        assert tokens == [*wanted["prompt_ids"], *wanted["completion_ids"]]
        assert mask == [0] * len(wanted["prompt_ids"]) + [1] * len(wanted["completion_ids"])
        content, _ = document("kto", row)
        assert content is not None
        assert orjson.loads(content)["label"] == (label in (True, "true"))


@pytest.mark.parametrize("label", [1, "1", "high"])
@pytest.mark.parametrize("with_begin", [False, True], ids=["plain", "with begin"])
def test_a_sample_to_classify_has_transformers_tokens(label: Any, with_begin: bool) -> None:
    tokenizer, encoder = tokenizer_of(LLAMA3, with_begin), encoder_of(LLAMA3, with_begin)
    text = "What is 2 + 2, é🙂?"
    chat = [SYSTEM, USER]  # without an answer
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    for row, wanted in (({"text": text}, tokenizer(text).input_ids), ({"messages": chat}, ids)):
        content, why = document("classification", {**row, "label": label})
        assert content is not None, why
        encoded_rows = encode_rows(encoder, [content], None, "classification", ("low", "high"))
        assert encoded_rows.chats.tokens.tolist() == wanted
        assert encoded_rows.chats.mask.all()
        assert encoded_rows.labels is not None
        assert encoded_rows.labels.tolist() == [1]


def test_a_pair_with_a_long_prompt_on_either_side_is_dropped() -> None:
    sides: list[list[dict[str, Any]]] = [[GOOD], [USER, BAD]]
    rows = [
        {"prompt": [USER], "chosen": chosen, "rejected": rejected}
        for chosen, rejected in ([[GOOD], [BAD]], sides, sides[::-1], [[BAD], [GOOD]])
    ]
    contents = [content for row in rows if (content := document("preference", row)[0])]
    read = encode_rows(encoder_of(CHATML), contents, None, "preference")
    lengths = read.chats.lengths
    limit = int(read.chats.mask[: lengths[0]].argmax())
    short = without_long_prompts(read, 2, limit)
    assert short.dropped == (1, 2)
    assert short.chats.lengths.tolist() == (lengths * [1, 1, 0, 0, 0, 0, 1, 1]).tolist()
    assert len(short.chats.mask) == len(short.chats.tokens) == short.chats.lengths.sum()
    assert without_long_prompts(read, 2, 10_000).dropped == ()


def test_labels_without_a_name_are_bad_documents() -> None:
    rows = [{"text": "a b", "label": label} for label in ("low", 2, -1, "other", 1)]
    contents = [content for row in rows if (content := document("classification", row)[0])]
    encoded_rows = encode_rows(encoder_of(None), contents, None, "classification", ("low", "high"))
    assert [number for number, _ in encoded_rows.chats.problems] == [1, 2, 3]
    why = "its label is 'other', which is not 0 to 1 or one of low, high"
    assert encoded_rows.chats.problems[2][1] == why
    assert (encoded_rows.chats.lengths > 0).tolist() == [True, False, False, False, True]
    assert encoded_rows.labels is not None
    assert encoded_rows.labels[[0, 4]].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("names", "label", "number"),
    [
        *((("low", "high"), label, 1) for label in (1, "1", "high")),
        *((("low", "high"), label, None) for label in ("01", "1.0", " 1", "\u0661", "High", 2)),
        *((("1", "2", "3"), label, None) for label in (0, 1, 3, "0", "4")),
        (("1", "2", "3"), "1", 0),
        *((("0", "1", "2"), label, 1) for label in (1, "1")),
        *((("-1", "0", "1"), label, None) for label in (-1, 0, 1)),
        (("-1", "0", "1"), "-1", 0),
        *((("1.5", "one"), label, None) for label in (0, 1, "0")),
        (("1.5", "one"), "one", 1),
    ],
)
def test_a_number_has_one_meaning(names: tuple[str, ...], label: Any, number: int | None) -> None:
    content, _ = document("classification", {"text": "a b", "label": label})
    assert content is not None
    rows = encode_rows(encoder_of(None), [content], None, "classification", names)
    assert rows.labels is not None
    assert (len(rows.chats.problems) == 1) == (number is None)
    assert number is None or rows.labels.tolist() == [number]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([], "--labels: 0 names"),
        (["--labels", "a", "a"], "--labels: 2 names, 1 of them different"),
        (["--labels", "a", "b", "--learn", "last"], "samples of --format classification are"),
        (["--labels", "a", "--format", "text"], "--labels are of --format classification"),
    ],
)
def test_options_that_do_not_fit_labels(
    more: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": 0}])
    words = ["--input", source, "--tokenizer", tmp_path, "--output", tmp_path / "out"]
    assert run("tokenize", *words, "--format", "classification", *more) == 2
    assert why in capsys.readouterr().err


BAD_ROWS: list[tuple[Rows, dict[str, Any], str]] = [
    ("preference", {"chosen": "a", "rejected": None, "prompt": "x"}, "it has no rejected"),
    ("preference", {"chosen": "a", "rejected": "a", "prompt": "x"}, "and rejected are equal"),
    ("preference", {"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are equal"),
    ("preference", {"chosen": "a", "rejected": "b"}, "have no common beginning"),
    ("preference", {"chosen": [GOOD], "rejected": [BAD]}, "have no common beginning"),
    ("preference", {"chosen": "", "rejected": "b", "prompt": "x"}, "its chosen is empty"),
    ("preference", {"chosen": "", "rejected": "b"}, "its chosen is empty"),
    ("preference", {"chosen": "a", "rejected": ""}, "its rejected is empty"),
    ("preference", {"chosen": [GOOD], "rejected": [], "prompt": [USER]}, "its rejected is empty"),
    ("preference", {"chosen": [], "rejected": [USER, BAD]}, "have no common beginning"),
    (
        "preference",
        {"chosen": [GOOD], "rejected": [{**BAD, "content": ""}], "prompt": [USER]},
        "message 1 of its rejected is empty",
    ),
    (
        "preference",
        {"chosen": [GOOD], "rejected": [{**BAD, "weight": 0.5}], "prompt": [USER]},
        "message 1 of its rejected has weight 0.5: only conversations that are learned token by",
    ),
    (
        "classification",
        {"messages": [USER, {**GOOD, "weight": 0.5}], "label": 1},
        "message 2 of its messages has weight 0.5",
    ),
    ("preference", {"chosen": "a", "rejected": [BAD], "prompt": "x"}, "all text or all messages"),
    ("preference", {"chosen": "a", "rejected": "b", "prompt": [USER]}, "all text or all messages"),
    (
        "preference",
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": [USER]},
        "which would be there twice",
    ),
    (
        "preference",
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": "another"},
        "its prompt is text, and not the last message",
    ),
    ("kto", {"prompt": "a", "completion": "b", "label": 0.5}, "its label is 0.5"),
    ("kto", {"prompt": "a", "completion": "", "label": True}, "its completion is empty"),
    ("kto", {"prompt": "a", "completion": None, "label": True}, "it has no completion"),
    ("classification", {"text": "a", "label": 0.5}, "its label is 0.5, which is neither"),
    ("classification", {"text": "a", "label": True}, "its label is True, which is neither"),
    ("classification", {"text": "", "label": 1}, "its text is empty"),
    ("classification", {"label": 1}, "it has neither of text and messages"),
    ("classification", {"text": "a", "messages": [USER], "label": 1}, "it has both of text"),
]


@pytest.mark.parametrize(("name", "row", "why"), BAD_ROWS)
def test_a_row_without_two_answers_is_refused(name: Rows, row: dict[str, Any], why: str) -> None:
    content, reason = document(name, row)
    assert content is None
    assert why in reason


def test_the_prompt_of_ultrafeedback_is_text_beside_messages() -> None:
    row = {"prompt": USER["content"], "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    plain = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    assert document("preference", row) == document("preference", plain)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words: object) -> int:
    return main([*map(str, words)])


def test_pairs_become_shards_that_only_a_preference_may_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    rows: list[dict[str, Any]] = [
        {"prompt": turns(f"What is {n}?")[:1], "chosen": [GOOD], "rejected": [BAD]}
        for n in range(40)
    ]
    # One that renders alike, one without an answer that is learned.
    strange = [
        {"prompt": [USER], "chosen": [{**GOOD, "x": 1}], "rejected": [{**GOOD, "x": 2}]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [USER]},
    ]
    source = write_rows(tmp_path / "pairs.jsonl", [*rows[:20], *strange, *rows[20:]])
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--held-out", 0.2]
    assert run(*words, "--output", tmp_path / "refused") == 2
    assert f"{source}:21: chosen and rejected become the same tokens" in capsys.readouterr().err
    for number, size in ((1, "1MB"), (2, "2KB")):
        out = tmp_path / f"out{number}"
        assert run(*words, "--output", out, "--skip-bad", "--shard-size", size) == 0
        assert corrupt_files(out) == []
        manifest = read_manifest(out)
        assert (manifest.rows, manifest.skipped_documents) == ("preference", 2)
        assert "rejected: no assistant tokens to train on" in (out / "errors.jsonl").read_text()
        assert "preference: 40 pairs" in capsys.readouterr().out
    splits: list[Any] = ["train", "held_out"]
    documents_of_splits = [documents_of(tmp_path / "out1", split) for split in splits]
    assert documents_of_splits == [documents_of(tmp_path / "out2", split) for split in splits]
    assert [len(part) % 2 for part in documents_of_splits] == [0, 0]
    assert sum(map(len, documents_of_splits)) == 80
    assert len(documents_of_splits[1]) > 0
    tokenizer_of_data = tokenizer_of(CHATML)
    for chosen, rejected in zip(
        documents_of_splits[0][::2], documents_of_splits[0][1::2], strict=True
    ):
        both = [
            tokenizer_of_data.decode([t for t, m in zip(*half, strict=True) if m])
            for half in (chosen, rejected)
        ]
        assert both == [GOOD["content"] + "<|im_end|>", BAD["content"] + "<|im_end|>"]
    assert run("inspect", tmp_path / "out1", "--mask", "--document", 2, 3) == 0
    said = capsys.readouterr().out
    assert "document 2 (pair 1, chosen) of train" in said
    assert "document 3 (pair 1, rejected) of train" in said
    refuse_next_token(tmp_path, tmp_path / "out1", "has preference pairs", capsys)


def refuse_next_token(
    place: Path, shards: Path, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that `check --inputs` refuses the dataset in one line."""
    data = {"path": str(shards), "packing": "best_fit"}
    batch = {"sequence_length": 64, "global_batch_size": 1}
    path, output = place / "run.yaml", {"directory": str(place / "run")}
    tree = run_tree(model=llama(400), data=data, batch=batch, output=output)
    path.write_text(json.dumps(tree))
    assert run("check", "--config", path, "--inputs") == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "next_token" in text]
    assert line.strip().startswith(f"data.path = '{shards}': {why}")


def test_labels_are_beside_the_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    rows = [
        {"prompt": f"{n}?", "completion": f"It is {n}.", "label": n % 3 == 0} for n in range(30)
    ]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "rows.parquet")
    out = tmp_path / "out"
    words = ["tokenize", "--input", tmp_path / "rows.parquet", "--tokenizer", tokenizer]
    assert run(*words, "--output", out, "--held-out", 0.3) == 0
    said = capsys.readouterr()
    assert "match --format kto" in said.err
    assert "kto: 10 desirable and 20 undesirable answers" in said.out
    dataset = open_dataset(out)
    assert dataset.table.rows == "kto"
    labels = {}
    for split in ("train", "held_out"):
        for shard in dataset.shards(split):  # type: ignore[arg-type]
            assert len(shard.labels) == shard.num_documents
            for number in range(shard.num_documents):
                text = tokenizer_of(CHATML).decode(shard.document(number).tolist())
                labels[int(text.split("?")[0])] = int(shard.labels[number])
    assert labels == {n: int(n % 3 == 0) for n in range(30)}
    assert run("inspect", out, "--document", 0) == 0
    assert "document 0 (desirable)" in capsys.readouterr().out or labels[0] == 0
    refuse_next_token(tmp_path, out, "has answers with labels (kto)", capsys)
    path = next(out.glob("train-*.labels"))
    path.write_bytes(bytes(1 - byte for byte in path.read_bytes()))
    assert any("labels" in problem for problem in corrupt_files(out))


def test_what_a_template_drops_is_counted_of_pairs_that_are_used() -> None:
    named = {**USER, "name": "Ada"}  # a key that the template does not read
    rows = [
        {"prompt": [named], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [named], "chosen": [GOOD], "rejected": [USER]},  # no answer that is learned
    ]
    contents = [content for row in rows if (content := document("preference", row)[0])]
    assert len(contents) == 2
    chats = encode_rows(encoder_of(LLAMA3), contents, None, "preference").chats
    assert [number for number, _ in chats.problems] == [1]
    assert chats.unrendered == {"message_keys.name": 2}


def test_a_pair_that_is_also_a_conversation_is_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "messages": [USER, GOOD]}
    source = write_rows(tmp_path / "rows.jsonl", [row])
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "out"]
    assert run(*words) == 2
    said = capsys.readouterr().err
    rule = "the first row has the keys of several formats -> the one that is meant: "
    assert f"{rule}--format messages, or --format preference\n" in said
    assert run(*words, "--format", "preference") == 0
    assert read_manifest(tmp_path / "out").num_documents("train") == 2
