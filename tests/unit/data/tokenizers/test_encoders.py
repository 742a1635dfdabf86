"""Fast encoders: equal to the reference, or found out and not used."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.cli import main
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.tokenizers.edge_cases import SENTENCES, tokenizer_edge_cases
from bigtrain.data.tokenizers.encoders import (
    FAST_ENCODERS,
    Encoded,
    Encoder,
    EncoderError,
    FastokensEncoder,
    GigatokenEncoder,
)
from bigtrain.data.tokenizers.equivalence import CheckSampler, choose_encoder, require_equal
from bigtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bigtrain.data.tokenizers.training import train_tokenizer
from tests.support.tiers import examples

FAST = sorted(FAST_ENCODERS)
GIGATOKEN = f"gigatoken {version('gigatoken')}"
FASTOKENS = f"fastokens {version('fastokens')}"


@pytest.fixture(scope="module", autouse=True)
def fastokens_loads_once() -> Iterator[None]:
    """Of each tokenizer: loading takes seconds at any size, and encoding changes nothing."""
    loaded: dict[str, Any] = {}
    load = FastokensEncoder._load

    def once(self: FastokensEncoder) -> Any:
        if self.tokenizer_json not in loaded:
            loaded[self.tokenizer_json] = load(self)
        return loaded[self.tokenizer_json]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FastokensEncoder, "_load", once)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trained = train_tokenizer([[*SENTENCES, "The quick brown fox. naïve 東京"] * 3], 900)
    trained.huggingface.add_tokens(["<plain>"])
    trained.huggingface.add_tokens(["<extra>"], special_tokens=True)
    directory = tmp_path_factory.mktemp("tokenizer") / "saved"
    trained.save(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(saved: Path) -> Tokenizer:
    """As `bigtrain tokenize` loads it: fastokens loads the same file for all."""
    return load_tokenizer(str(saved))


def fast(name: str, tokenizer: Tokenizer, parse_special_tokens: bool = False) -> Encoder:
    reference = tokenizer.encoder(parse_special_tokens)
    return FAST_ENCODERS[name](
        reference.tokenizer_json, reference.end_of_document_id, parse_special_tokens
    )


@pytest.fixture(scope="module")
def encoders(tokenizer: Tokenizer) -> tuple[dict[str, Encoder], dict[str, Encoder]]:
    reference: Encoder = tokenizer.encoder()
    return {name: fast(name, tokenizer) for name in FAST}, dict.fromkeys(FAST, reference)


@pytest.mark.parametrize("parse_special_tokens", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_equal_on_the_hard_sample(
    name: str, tokenizer: Tokenizer, parse_special_tokens: bool
) -> None:
    reference = tokenizer.encoder(parse_special_tokens)
    contents = [text.encode() for text in tokenizer_edge_cases(reference.tokenizer_json)]
    require_equal(fast(name, tokenizer, parse_special_tokens), reference, contents)


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=examples(150))
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=50), max_size=4))
def test_equal_on_anything(
    name: str, encoders: tuple[dict[str, Encoder], dict[str, Encoder]], texts: list[str]
) -> None:
    encoded, expected = (pair[name].encode(texts) for pair in encoders)
    assert encoded.tokens.tolist() == expected.tokens.tolist()
    assert encoded.lengths.tolist() == expected.lengths.tolist()


@pytest.mark.parametrize("name", [*FAST, "reference"])
def test_special_tokens_in_text(name: str, tokenizer: Tokenizer) -> None:
    text = ["a<|endoftext|>b<extra><plain>"]
    ids = tokenizer.huggingface.convert_tokens_to_ids(["<|endoftext|>", "<extra>", "<plain>"])
    for parse, expected in ((False, ids[2:]), (True, ids)):
        encoder = tokenizer.encoder(parse)
        chosen = encoder if name == "reference" else fast(name, tokenizer, parse)
        assert [t for t in chosen.encode(text).tokens[:-1] if t in ids] == expected


def test_the_fastest_that_is_right_is_chosen(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = choose_encoder(tokenizer.encoder(), "auto")
    assert (queue.current.library, queue.reason) == ("gigatoken", "")
    queue.reject("it was wrong")
    assert queue.current.library == "fastokens"
    queue.reject("as well")
    assert queue.current is queue.reference
    assert queue.reason == f"not {GIGATOKEN}: it was wrong; not {FASTOKENS}: as well"
    assert f"encoder {GIGATOKEN} is not used: it was wrong" in caplog.text
    assert choose_encoder(tokenizer.encoder(), "reference").candidates == []
    assert choose_encoder(tokenizer.encoder(), "fastokens").current.library == "fastokens"
    once = choose_encoder(tokenizer.encoder(), "auto", read_once=True)
    assert once.current is once.reference
    assert "can be read only once" in once.reason
    monkeypatch.setitem(FAST_ENCODERS, "gigatoken", WrongOnCombiningMarks)
    queue = choose_encoder(tokenizer.encoder(), "auto")
    assert queue.current.library == "fastokens"
    assert "characters, 'na\\xefve nai\\u0308ve " in queue.reason
    assert queue.reason.endswith(f"differently from tokenizers {version('tokenizers')}")


def test_an_encoder_that_is_not_installed_is_passed_over(
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def absent(name: str) -> str:
        if name == "gigatoken":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path))  # nothing was found equal before
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr("bigtrain.data.tokenizers.encoders.metadata.version", absent)
    queue = choose_encoder(tokenizer.encoder(), "auto")
    assert queue.current.library == "fastokens"
    assert queue.reason.startswith("not gigatoken (not installed): it fails with ModuleNotFound")
    assert caplog.text.count("gigatoken (not installed) is not used") == 1


def test_a_tokenizer_that_the_fast_ones_do_not_know() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from bigtrain.data.tokenizers.encoders import ReferenceEncoder

    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<unk>")
    queue = choose_encoder(ReferenceEncoder(wrapped.backend_tokenizer.to_str(), 0), "auto")
    assert queue.current is queue.reference
    assert f"not {GIGATOKEN}: it fails with " in queue.reason
    assert queue.current.encode(["a b"]).tokens.tolist() == [1, 0, 0]


class WrongOnCombiningMarks(GigatokenEncoder):
    """What gigatoken 0.9.0 did with Qwen's tokenizer: composed forms taken for another."""

    def encode_utf8(self, contents: Sequence[bytes]) -> Encoded:
        return super().encode_utf8([content.replace(b"\xcc\x88", b"") for content in contents])


class WrongOnOneWord(GigatokenEncoder):
    """Right on the edge cases, wrong on this input."""

    def encode_utf8(self, contents: Sequence[bytes]) -> Encoded:
        return super().encode_utf8([content.replace(b"zebra", b"horse") for content in contents])


class Breaks(GigatokenEncoder):
    """Fails on this input."""

    def encode_utf8(self, contents: Sequence[bytes]) -> Encoded:
        if any(b"zebra" in content for content in contents):
            raise EncoderError("it fails with Panic: zebra")
        return super().encode_utf8(contents)


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix in (".bin", ".idx")
    }


def test_a_wrong_encoder_is_found_in_the_middle(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {n} of many" for n in range(2500)]
    texts[2100] = "a zebra"  # among the first 64 of the last unit, which are compared
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = ["tokenize", "--input", str(source), "--tokenizer", str(saved)]
    command += ["--held-out", "0.1", "--shard-size", "15000"]
    monkeypatch.setattr("bigtrain.data.documents.formats.BATCH_BYTES", 5000)
    assert main([*command, "--output", str(tmp_path / "a"), "--encoder", "reference"]) == 0
    monkeypatch.setitem(FAST_ENCODERS, "gigatoken", WrongOnOneWord)
    assert main([*command, "--output", str(tmp_path / "b")]) == 0
    monkeypatch.setitem(FAST_ENCODERS, "gigatoken", Breaks)
    assert main([*command, "--output", str(tmp_path / "c"), "--encoder", "gigatoken"]) == 0
    assert len(files_of(tmp_path / "a")) > 6
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") == files_of(tmp_path / "c")
    tokenizers = [read_manifest(tmp_path / name).tokenizer for name in "abc"]
    assert [t.engine.split()[0] for t in tokenizers] == ["tokenizers", "fastokens", "tokenizers"]
    for tokenizer in tokenizers[1:]:
        assert tokenizer.engine_reason.startswith(f"not {GIGATOKEN}: it ")
        assert "zebra" in tokenizer.engine_reason


def test_which_documents_are_compared() -> None:
    sampler = CheckSampler()
    assert sampler.choose([b"x"] * 300).documents == tuple(range(64))
    later = sampler.choose([b"x"] * 800 + ["Ω".encode()] * 40)
    assert later.documents == (700, *range(800, 808)), "number 1000, and the first 8 in Greek"
    long = sampler.choose([b"x" * 90_000 + "ж".encode() * 90_000])
    assert long.documents == ()
    (piece,) = long.pieces
    assert piece.startswith(b"x" * 256 + "ж".encode())
    assert len(piece) <= 1 << 12
