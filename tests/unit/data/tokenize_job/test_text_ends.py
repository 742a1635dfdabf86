"""What texts begin and end with: one setting, in shards, prompts, samples and lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from bigtrain.cli import main
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.models.generation import prompt_ids
from bigtrain.run.text_ids import text_record
from bigtrain.system.text_record import read_record
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.datasets import open_verified

BOS, EOS, TURN = "<|begin_of_text|>", "<|endoftext|>", "<|im_end|>"
TEXTS = ["Hello world", f"second {EOS} text", "", " ", "naïve 東京 🙂", "x" * 5000] * 8
"""Of which the empty one has no tokens."""


def save_tokenizer(directory: Path, *, adds_bos: bool = True) -> Path:
    tokenizer = chat_tokenizer(CHATML)
    if adds_bos:  # as Llama 3's and Gemma's
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(str(directory))
    return directory


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def tokenize(source: Path, tokenizer: Path, output: Path, *options: object) -> int:
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", output]
    return main([*map(str, command), *map(str, options)])


def documents(path: Path) -> list[list[int]]:
    (shard,) = open_verified(path).shards("train")
    return [shard.document(number).tolist() for number in range(shard.num_documents)]


@pytest.mark.parametrize(
    ("adds_bos", "policy", "begins"),
    [(True, None, True), (True, "never", False), (False, "auto", False), (False, "always", True)],
)
def test_documents_begin_and_end_as_set(
    source: Path, tmp_path: Path, adds_bos: bool, policy: str | None, begins: bool
) -> None:
    """Against transformers: ``auto`` is what the tokenizer does when it is called on a text."""
    directory = save_tokenizer(tmp_path / "t", adds_bos=adds_bos)
    options = () if policy is None else ("--beginning-of-text", policy)
    out = tmp_path / "out"
    assert tokenize(source, directory, out, *options) == 0
    tokenizer: Any = load_tokenizer(str(directory)).huggingface
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    expected = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        if policy in (None, "auto"):
            own = tokenizer(text, split_special_tokens=True).input_ids
            assert own == [*([bos] if begins else []), *ids]
        expected.append([*([bos] if begins else []), *ids, eos] if ids else [])
    assert documents(out) == expected
    manifest = read_manifest(out)
    assert manifest.tokenizer.beginning_ids == ((bos,) if begins else ())
    record = text_record([manifest.tokenizer])
    plain = tokenizer("Hi", add_special_tokens=False).input_ids
    assert prompt_ids(tokenizer, "Hi", record) == [*([bos] if begins else []), *plain]
    if policy is None:  # a foreign model, without a record of bigtrain's
        assert prompt_ids(tokenizer, "Hi", None) == tokenizer("Hi").input_ids
    assert prompt_ids(tokenizer, f"{BOS}Hi", record).count(bos) == 1
    record.save(out)
    assert read_record(out) == record


def test_the_end_of_documents_can_be_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_tokenizer(tmp_path / "t")
    tokenizer: Any = load_tokenizer(str(directory)).huggingface
    turn = tokenizer.convert_tokens_to_ids(TURN)
    assert tokenize(source, directory, tmp_path / "out", "--end-of-document", TURN) == 0
    assert {document[-1] for document in documents(tmp_path / "out") if document} == {turn}
    assert read_manifest(tmp_path / "out").tokenizer.end_of_document_id == turn
    assert tokenize(source, directory, tmp_path / "no", "--end-of-document", "<|x|>") == 2
    error = capsys.readouterr().err
    assert "--end-of-document <|x|>: not a token of" in error
    assert not (tmp_path / "no").exists()


def test_always_needs_a_token(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_tokenizer(None)
    chat.bos_token = None
    chat.save_pretrained(str(tmp_path / "t"))
    assert tokenize(source, tmp_path / "t", tmp_path / "o", "--beginning-of-text", "always") == 2
    assert "has no beginning-of-text token -> set bos_token" in capsys.readouterr().err


def test_prompts_and_completions_follow_the_setting(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path / "t")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Q: 2+2? A:", "completion": " 4"}) + "\n")
    tokens_by_policy = {}
    for policy in ("auto", "never"):
        assert tokenize(path, directory, tmp_path / policy, "--beginning-of-text", policy) == 0
        (tokens_by_policy[policy],) = documents(tmp_path / policy)
    bos = load_tokenizer(str(directory)).huggingface.bos_token_id
    assert tokens_by_policy["auto"] == [bos, *tokens_by_policy["never"]]
    assert np.array_equal(tokens_by_policy["never"][-1:], [0])
