"""Fill-in-the-middle: which documents, which cuts, which tokens; the same from any workers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bigtrain.cli import main
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import FillInMiddleRecord, read_manifest
from bigtrain.data.tokenize_job.fill_in_middle import KNOWN_TOKENS, FillInMiddle
from bigtrain.data.tokenize_job.unit_builder import is_held_out
from bigtrain.data.tokenizers.encoders import Encoded
from tests.support.chats import chat_tokenizer

NAMES = KNOWN_TOKENS[1]
TEXTS = [f"def f{n}(x):\n    return x + {n}  # é東🙂 {'a' * (n % 7)}\n" for n in range(300)]


def rule(**fields: Any) -> FillInMiddle:
    return FillInMiddle(FillInMiddleRecord(**{"rate": 1.0, **fields}), (1, 2, 3))


def test_rates_and_cuts_are_as_drawn() -> None:
    contents = [text.encode() for text in TEXTS * 1]
    half = [rule(rate=0.5, spm_rate=0.25).cut(content) for content in contents]
    done = [cut for cut in half if cut is not None]
    assert 0.4 < len(done) / len(half) < 0.6
    assert 0.15 < sum(cut.mode == "spm" for cut in done) / len(done) < 0.35
    every = [rule().cut(content) for content in contents]
    lows, highs = [], []
    for content, cut in zip(contents, every, strict=True):
        assert cut is not None
        assert cut.prefix + cut.middle + cut.suffix == content
        length = len(content.decode())
        lows.append(len(cut.prefix.decode()) / length)
        highs.append(1 - len(cut.suffix.decode()) / length)
    # Two sorted uniform draws: a third and two thirds on average.
    assert abs(np.mean(lows) - 1 / 3) < 0.05
    assert abs(np.mean(highs) - 2 / 3) < 0.05
    other = [rule(seed=1).cut(content) for content in contents]
    assert sum(a == b for a, b in zip(every, other, strict=True)) < 20
    assert rule().cut(b"") is None
    # A document's fate does not follow from its split.
    chosen = [rule(rate=0.5).cut(c) is not None for c in contents if is_held_out(c, 0.5)]
    assert 0.3 < np.mean(chosen) < 0.7


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = chat_tokenizer(None)
    made.add_special_tokens({"additional_special_tokens": list(NAMES)})
    made.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def tokenize(source: Path, tokenizer: Path, output: Path, *more: object) -> int:
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", output, *more]
    return main([*map(str, words)])


def write_texts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def documents(path: Path, split: Any = "train") -> list[list[int]]:
    return [
        shard.document(number).tolist()
        for shard in open_dataset(path).shards(split)
        for number in range(shard.num_documents)
    ]


def test_a_beginning_that_the_text_spells_occurs_once() -> None:
    """Also in a document that is cut at its first character, whose prefix is empty."""
    how = FillInMiddle(FillInMiddleRecord(rate=1.0, spm_rate=0.0, seed=0), (90, 91, 92))
    begin, end = ord("<"), ord(">")

    def encode_utf8(texts: Sequence[bytes], *, has_ends: bool = True) -> Encoded:
        documents = [[begin, *text, end] if has_ends else [*text] for text in texts]
        lengths = np.array([len(document) for document in documents])
        return Encoded(np.array([*itertools.chain(*documents)]), lengths)

    encoder: Any = SimpleNamespace(
        encode_utf8=encode_utf8,
        beginning_ids=(begin,),
        end_of_document_id=end,
        parse_special_tokens=True,
    )
    checks: Any = SimpleNamespace(run=lambda *_: None)
    contents = [f"<{n}{'a' * (n % 3)}>".encode() for n in range(200)]
    cuts = [how.cut(content) for content in contents]
    assert any(cut is not None and cut.prefix == b"" and cut.middle for cut in cuts)
    assert any(cut is not None and cut.prefix == cut.middle == b"" for cut in cuts)
    fixed = np.zeros(len(contents), bool)
    encoded = how.encode(contents, fixed, encoder, encoder, checks).encoded
    for document in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1]):
        assert (document[0], document[-1]) == (begin, end)
        assert [*document].count(begin) == [*document].count(end) == 1


def test_documents_are_rearranged_as_in_starcoder(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_texts(tmp_path / "code.jsonl")
    options = ["--fim-rate", 0.6, "--fim-seed", 3, "--held-out", 0.2]
    assert tokenize(source, tokenizer, tmp_path / "one", *options, "--workers", 1) == 0
    assert "fill-in-the-middle of " in capsys.readouterr().out
    many = ["--shard-size", "4KB", "--encoder", "reference"]
    assert tokenize(source, tokenizer, tmp_path / "many", *options, *many) == 0
    assert documents(tmp_path / "one") == documents(tmp_path / "many")
    manifest = read_manifest(tmp_path / "one")
    loaded = PreTrainedTokenizerFast.from_pretrained(str(tokenizer))
    pre, suf, mid = ids = [loaded.convert_tokens_to_ids(name) for name in NAMES]
    assert manifest.tokenizer.fill_in_middle_ids == tuple(ids)
    assert manifest.options.fill_in_middle == FillInMiddleRecord(rate=0.6, seed=3)

    def of(part: bytes) -> list[int]:
        token_ids: list[int] = loaded.encode(part.decode(), add_special_tokens=False)
        return token_ids

    how = FillInMiddle(FillInMiddleRecord(rate=0.6, seed=3), (pre, suf, mid))
    contents = [text.encode() for text in TEXTS]
    expected: dict[bool, list[list[int]]] = {False: [], True: []}
    modes = {"psm": 0, "spm": 0}
    for content in contents:
        held_out = is_held_out(content, 0.2)
        cut = None if held_out else how.cut(content)
        if cut is None:
            tokens = of(content)
        elif cut.mode == "psm":
            tokens = [pre, *of(cut.prefix), suf, *of(cut.suffix), mid, *of(cut.middle)]
        else:
            tokens = [pre, suf, *of(cut.suffix), mid, *of(cut.prefix), *of(cut.middle)]
        if cut is not None:
            modes[cut.mode] += 1
        expected[held_out].append([*tokens, loaded.eos_token_id])
    assert documents(tmp_path / "one") == expected[False]
    assert documents(tmp_path / "one", "held_out") == expected[True]
    assert manifest.fill_in_middle == modes
    assert min(modes.values()) > 20


def test_it_is_refused_where_it_cannot_be_exact(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_texts(tmp_path / "code.jsonl"), tmp_path / "out"
    bare = tmp_path / "bare"
    chat_tokenizer(None).save_pretrained(bare)
    spaced = Backend(models.BPE({"a": 0, "▁": 1, "b": 2, "<eos>": 3, "(": 4, "\n": 5}, []))
    spaced.pre_tokenizer = pre_tokenizers.Metaspace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=spaced, eos_token="<eos>")
    wrapped.add_special_tokens({"additional_special_tokens": list(NAMES)})
    wrapped.save_pretrained(tmp_path / "spaced")
    for place, more, why in (
        (bare, ["--fim-rate", 0.5], "has no tokens for fill-in-the-middle"),
        (bare, ["--fim-rate", 0.5, "--fim-tokens", "a", "b", "<x>"], "--fim-tokens <x>: not a"),
        (bare, ["--fim-rate", 0.5, "--fim-tokens", "a", "b", "a"], "one token twice"),
        (tmp_path / "spaced", ["--fim-rate", 0.5], "as if it began anew"),
        (tokenizer, ["--fim-seed", 1], "--fim-seed is for fill-in-the-middle"),
        (tokenizer, ["--fim-rate", 0.5, "--chat-key", "text"], "of plain text -> remove it"),
    ):
        assert tokenize(source, place, out, *more) == 2, more
        assert why in capsys.readouterr().err
        assert not out.exists()
    # Other draws are another dataset.
    assert tokenize(source, tokenizer, out, "--fim-rate", 0.5) == 0
    assert tokenize(source, tokenizer, out, "--fim-rate", 0.5, "--fim-seed", 1) == 2
    assert "a dataset of other options" in capsys.readouterr().err
