"""Tokenizers: what they keep, what they are, and what they refuse."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bigtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import DataError
from tests.support.tiers import examples

SENTENCES = ["def f(x):\n    return x + 1\n", "The quick brown fox. " * 3, "naïve 東京 🙂 1234567"]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer([SENTENCES, SENTENCES], 300)


@pytest.fixture(scope="module")
def saved(trained: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer") / "saved"
    trained.save(directory)
    return directory


@settings(max_examples=examples(300))
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_decodes_to_itself(trained: Tokenizer, text: str) -> None:
    encoded = trained.encoder().encode([text])
    assert encoded.lengths.tolist() == [len(encoded.tokens)]
    if text:
        assert encoded.tokens[-1] == 0
    assert 0 not in encoded.tokens[:-1]
    assert trained.decode(encoded.tokens[:-1]) == text


def test_batches_are_their_documents(trained: Tokenizer) -> None:
    texts = [*SENTENCES, "", "x"]
    encoder = pickle.loads(pickle.dumps(trained.encoder()))
    together = encoder.encode(texts)
    alone = [encoder.encode([text]).tokens.tolist() for text in texts]
    assert together.lengths.tolist() == [len(tokens) for tokens in alone]
    assert together.lengths[3] == 0
    assert together.tokens.tolist() == [token for tokens in alone for token in tokens]
    assert encoder.encode([]).tokens.tolist() == []


def test_text_cannot_inject_control_tokens(trained: Tokenizer, saved: Path) -> None:
    text = "a<|endoftext|>b"
    plain = AutoTokenizer.from_pretrained(saved)
    assert 0 in plain(text, add_special_tokens=False).input_ids, "the letters mean a token to HF"
    tokens = load_tokenizer(str(saved)).encoder().encode([text]).tokens
    assert 0 not in tokens[:-1]
    assert trained.decode(tokens[:-1]) == text


def test_same_tokenizer_after_saving_and_loading(trained: Tokenizer, saved: Path) -> None:
    loaded = load_tokenizer(str(saved))
    assert (loaded.hash, loaded.vocab_size) == (trained.hash, trained.vocab_size)
    assert loaded.name == str(saved)
    loaded.huggingface("text", truncation=True, max_length=3)
    again = saved.parent / "again"
    loaded.save(again)
    assert load_tokenizer(str(again)).hash == trained.hash
    assert train_tokenizer([SENTENCES, SENTENCES], 300).hash == trained.hash
    assert train_tokenizer([SENTENCES], 290).hash != trained.hash


def test_too_little() -> None:
    with pytest.raises(DataError, match="--vocab-size 256 is too small"):
        train_tokenizer([["x"]], 256)
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        train_tokenizer([["", ""]], 300)


def test_tokenizers_that_cannot_be_had(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no tokenizer") as caught:
        load_tokenizer(str(tmp_path))
    assert "bigtrain tokenizer" in str(caught.value)
    with pytest.raises(DataError, match=rf"is a file, and a tokenizer is a folder .* -> {saved}$"):
        load_tokenizer(str(saved / "tokenizer.json"))
    with pytest.raises(DataError, match=rf" -> {saved}$"):  # such as the model's config.json
        load_tokenizer(str(saved / "tokenizer_config.json"))
    (tmp_path / "run.yaml").write_text("seed: 1")
    with pytest.raises(DataError, match=r"is a file, and a tokenizer is a folder with tokenizer"):
        load_tokenizer(str(tmp_path / "run.yaml"))
    for name in ("nobody/no-such-tokenizer", "nosuch"):
        with pytest.raises(
            DataError,
            match=rf"tokenizer {name}: not a directory here, and the Hugging Face Hub is unreach"
            "able, and it is not in the local cache",
        ):
            load_tokenizer(name)
    with pytest.raises(DataError, match="not a valid name on the Hugging Face Hub"):
        load_tokenizer("/no/such/directory")
    broken = Path(shutil.copytree(saved, tmp_path / "broken"))
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"the tokenizer in .*broken cannot be loaded"):
        load_tokenizer(str(broken))


def test_no_end_of_sequence(saved: Path, tmp_path: Path) -> None:
    tree = json.loads((saved / "tokenizer_config.json").read_text())
    PreTrainedTokenizerFast(tokenizer_file=str(saved / "tokenizer.json")).save_pretrained(
        tmp_path / "x"
    )
    assert "eos_token" in tree
    with pytest.raises(DataError, match="has no end-of-sequence token") as caught:
        load_tokenizer(str(tmp_path / "x"))
    named_end = json.dumps({"eos_token": tree["eos_token"]})[1:-1]
    assert str(caught.value).endswith(f"tokenizer_config.json: {named_end}")
