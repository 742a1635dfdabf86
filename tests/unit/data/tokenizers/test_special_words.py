"""Text of special tokens stays text, also where the model has them in its vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bigtrain.data.chat.control_tokens import ControlTokens
from bigtrain.data.tokenizers.encoders import ReferenceEncoder, hide_words

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
TEXTS = ["a cat said </s> to a dog", "cats and <|end|> dogs </s>", "<s> a dog < s > / |"]


def trained(kind: str) -> Backend:
    known: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    model, trainer = {
        "unigram": lambda: (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **known),
        ),
        "words": lambda: (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(**known)),
        "pieces": lambda: (
            models.WordPiece(unk_token="<unk>"),
            trainers.WordPieceTrainer(vocab_size=80, **known),
        ),
        "merges": lambda: (
            models.BPE(unk_token="<unk>", ignore_merges=True),
            trainers.BpeTrainer(vocab_size=80, **known),
        ),
    }[kind]()
    backend = Backend(model)
    backend.pre_tokenizer = (
        pre_tokenizers.Metaspace() if kind == "unigram" else pre_tokenizers.WhitespaceSplit()
    )
    backend.train_from_iterator(["a cat and a dog said < s > / | end", *"<s>/|end"] * 9, trainer)
    return backend


@pytest.mark.parametrize("kind", ["unigram", "words", "pieces", "merges"])
def test_no_document_injects_a_special_token(kind: str) -> None:
    backend = trained(kind)
    assert backend.get_vocab_size() == backend.get_vocab_size(with_added_tokens=False)
    plainly = Backend.from_str(backend.to_str())
    plainly.encode_special_tokens = True
    control = {backend.token_to_id(name) for name in SPECIAL if name != "<unk>"}
    assert control & set(plainly.encode(TEXTS[0]).ids)  # which is what is prevented
    encoded = ReferenceEncoder(backend.to_str(), None).encode(TEXTS)
    assert not control & set(encoded.tokens.tolist())
    words = "a cat and a dog"
    assert ReferenceEncoder(backend.to_str(), None).encode([words]).tokens.tolist() == (
        plainly.encode(words).ids
    )
    parsed = ReferenceEncoder(backend.to_str(), None, parse_special_tokens=True).encode(TEXTS)
    assert backend.token_to_id("</s>") in parsed.tokens


def test_conversations_of_unigram_models_may_hold_such_text() -> None:
    """And what their tokenizer does not know, which becomes its token for that."""
    backend = trained("unigram")
    control = ControlTokens(backend.to_str(), ())
    text = "cats </s> and ? dogs</s>"
    ids, ranges = control.encode(text, [(len(text) - 4, len(text))])
    end = backend.token_to_id("</s>")
    assert ids.tolist().count(end) == 1
    assert ids[-1] == end
    assert backend.token_to_id("<unk>") in ids
    assert ranges[-1].tolist() == [len(text) - 4, len(text)]


def test_merges_that_make_a_special_token_stay() -> None:
    model: dict[str, Any] = {
        "vocab": {"a": 0, "b": 1, "ab": 2, "<x>": 3}, "merges": [["a", "b"]], "ignore_merges": True,
    }  # fmt: skip
    assert hide_words(model, ["ab", "<x>"]) == {"<x>": "\U0010fffd<x>"}
    assert list(model["vocab"].values()) == [0, 1, 2, 3]
    assert "ab" in model["vocab"]
    assert hide_words({**model, "ignore_merges": False}, ["<x>"]) == {}


def test_ids_of_added_tokens_stay() -> None:
    backend = trained("unigram")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    wrapped.add_tokens(["<plain>"])
    wrapped.add_tokens(["<later>"], special_tokens=True)
    source = wrapped.backend_tokenizer.to_str()
    assert json.loads(source)["added_tokens"][-1]["content"] == "<later>"
    encoded = ReferenceEncoder(source, None).encode(["a <plain> dog <later>"])
    assert wrapped.convert_tokens_to_ids("<plain>") in encoded.tokens
    assert wrapped.convert_tokens_to_ids("<later>") not in encoded.tokens
