"""Tokens are those of a directory's tokenizer.json, whatever class is named beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from bigtrain.cli import main
from bigtrain.data.tokenizers.edge_cases import tokenizer_edge_cases
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import DataError
from tests.support.chats import chat_tokenizer
from tests.support.datasets import open_verified

WORD = "arguments"
"""A token of the test's tokenizer, and in no edge case."""

TEXTS = [
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # 1234567",
    WORD,
    "nai\u0308ve The QUICK \u212b e\u0301 <think>well</think> 東京 🙂  \n\n x",
]


def lower(backend: Any) -> None:
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])


def single_digits(backend: Any) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?[^\s\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def cut_decoder(backend: Any) -> None:
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("QUICK", "quick")])


def ignores_merges(backend: Any) -> None:
    """As Llama 3's: a word that is a token without merges that make it."""
    tree = json.loads(backend.model.__getstate__())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merges = [tuple(pair) for pair in tree["merges"] if WORD not in "".join(pair)]
    backend.model = models.BPE(tree["vocab"], merges, ignore_merges=True)


def own_steps(backend: Any) -> None:
    """GPT-2's own, with another decoder."""
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut_decoder(backend)


def begins(backend: Any) -> None:
    number = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", number)]
    )


def strips(backend: Any) -> None:
    backend.add_tokens([AddedToken("quick", lstrip=True, rstrip=True, normalized=False)])


CHANGES: list[Callable[[Any], None] | None] = [None, lower, single_digits, cut_decoder, begins]
CHANGES += [strips, own_steps, ignores_merges]


def save(directory: Path, kind: str | None, change: Callable[[Any], None] | None) -> Path:
    tokenizer = chat_tokenizer(None)
    if change is not None:
        change(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(str(directory))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("tokenizer_class")
    if kind is not None:
        settings["tokenizer_class"] = kind
    path.write_text(json.dumps(settings))
    return directory


def assert_as_in_file(directory: Path, loaded: Any, texts: list[str]) -> None:
    own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in texts:
        ids = own.encode(text, add_special_tokens=False).ids
        assert loaded.huggingface(text, add_special_tokens=False).input_ids == ids
        assert loaded.huggingface(text).input_ids == own.encode(text).ids
        assert loaded.encoder(True, ends=False).encode([text]).tokens.tolist() == ids
        assert loaded.decode(ids) == own.decode(ids, skip_special_tokens=False)
    assert loaded.huggingface.get_vocab() == own.get_vocab()
    assert loaded.vocab_size == own.get_vocab_size()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("GPT2Tokenizer", change) for change in CHANGES),
        ("Qwen2Tokenizer", lower),
        ("LlamaTokenizerFast", None),
        ("LlamaTokenizerFast", ignores_merges),
        *((kind, single_digits) for kind in (None, "NoSuchTokenizer", "PreTrainedTokenizerFast")),
        ("T5Tokenizer", single_digits),  # cannot be built of a BPE
        ("GemmaTokenizer", single_digits),  # adds a token ``<mask>``
    ],
)
def test_the_file_wins(kind: str | None, change: Any, tmp_path: Path) -> None:
    directory = save(tmp_path / "t", kind, change)
    assert_as_in_file(directory, load_tokenizer(str(directory)), TEXTS)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen2", "llama"])
def test_beside_a_model(model_type: str, tmp_path: Path) -> None:
    """Without a class in its settings, transformers takes that of the model's type."""
    directory = save(tmp_path / "t", None, single_digits)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert_as_in_file(directory, load_tokenizer(str(directory)), TEXTS)


def test_shards_and_what_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so at every load, also of a cached tokenizer, and shards have a tokenizer that
    transformers itself loads as the file is."""
    directory, out = save(tmp_path / "t", "GPT2Tokenizer", single_digits), tmp_path / "out"
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    command = ["tokenize", "--input", source, "--tokenizer", directory, "--output", out]
    assert main([*map(str, command)]) == 0
    own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    (shard,) = open_verified(out).shards("train")
    own.encode_special_tokens = True
    expected = [[*own.encode(text, add_special_tokens=False).ids, 0] for text in TEXTS]
    assert [shard.document(number).tolist() for number in range(len(TEXTS))] == expected
    caplog.clear()
    load_tokenizer(str(directory))
    (record,) = caplog.records
    assert "class GPT2Tokenizer does not follow" in record.message
    assert "pre_tokenizer" in record.message
    saved: Any = AutoTokenizer.from_pretrained(out / "tokenizer")
    cases = tokenizer_edge_cases(own.to_str())[:200]
    own.encode_special_tokens = False
    assert saved(cases).input_ids == [own.encode(text).ids for text in cases]


def test_a_class_of_its_own_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2's class and GPT-2's pre-tokenizer: nothing to say."""
    tokenizer = chat_tokenizer(None)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save_pretrained(str(tmp_path / "t"))
    path = tmp_path / "t" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "tokenizer_class": "GPT2Tokenizer"}))
    loaded = load_tokenizer(str(tmp_path / "t"))
    assert type(loaded.huggingface).__name__ == "GPT2Tokenizer"
    assert not caplog.records


def test_a_class_that_adds_a_token(tmp_path: Path) -> None:
    """GPT-2's class wants its own end of text, in a vocabulary that has another."""
    directory = save(tmp_path / "t", "GPT2Tokenizer", own_steps)
    for path in directory.iterdir():
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("<|endoftext|>", "<|finis|>"), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    loaded = load_tokenizer(str(directory))
    assert_as_in_file(directory, loaded, TEXTS)
    assert loaded.end_of_document_id == tokenizer.token_to_id("<|finis|>")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    directory = save(tmp_path / "t", "GPT2Tokenizer", None)
    (directory / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(DataError, match=r"cannot be loaded"):
        load_tokenizer(str(directory))
