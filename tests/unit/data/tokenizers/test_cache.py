"""A tokenizer loaded without transformers is the one that transformers loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bigtrain.data.tokenizers import encoders
from bigtrain.data.tokenizers import equivalence as encoder_checks
from bigtrain.data.tokenizers.cache import _canonical, _changes, fingerprint, get_cached_tokenizer
from bigtrain.data.tokenizers.edge_cases import SENTENCES
from bigtrain.data.tokenizers.encoders import GigatokenEncoder
from bigtrain.data.tokenizers.equivalence import check_equivalence, choose_encoder
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.system import user_cache as known
from tests.support.worlds import ROOT

Change = Callable[[Path], None]


class Installed:
    """Another build of any library, as `importlib.metadata` describes it."""

    version = "6.0"
    editable = "false"

    def __init__(self, library: str) -> None:
        self.library = library

    def read_text(self, name: str) -> str | None:
        return {"direct_url.json": f'{{"dir_info": {{"editable": {self.editable}}}}}'}.get(name)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer([[*SENTENCES, "naïve 東京 quick brown"] * 2], 400).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def edit(name: str, **values: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / name
        tree = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**tree, **values}))

    return change


def old_merges(directory: Path) -> None:
    tree = json.loads((directory / "tokenizer.json").read_text())
    tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]
    (directory / "tokenizer.json").write_text(json.dumps(tree))


def template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}é\r\n")


TRUNCATION = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
CONFIG = "tokenizer_config.json"
CHANGES: dict[str, Change] = {
    "as trained": lambda directory: None,
    "tokens that loading adds": edit(CONFIG, bos_token="<bos>", extra_special_tokens=["<x>"]),
    "a class that rewrites": edit(CONFIG, tokenizer_class="LlamaTokenizer"),
    "a class of one model": edit(CONFIG, tokenizer_class="Qwen2Tokenizer"),
    "a class by the model": edit("config.json", model_type="gpt2"),
    "truncation": edit("tokenizer.json", truncation=TRUNCATION),
    "merges as texts": old_merges,
    "a chat template": template,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_as_transformers_loads_it(directory: Path, change: Change) -> None:
    change(directory)
    first, second = load_tokenizer(str(directory)), load_tokenizer(str(directory))
    assert second.cached is not None
    assert second.loaded is None
    assert (first.hash, first.vocab_size) == (second.hash, second.vocab_size)
    assert first.end_of_document_id == second.end_of_document_id
    # The file as it is: of another class than its own, transformers would not follow it.
    plain = change is CHANGES["a class of one model"]
    truth = (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(directory)
    expected = json.loads(truth.backend_tokenizer.to_str())
    # As `tokenizers` understands it: merges have had several spellings.
    encoder = encoders.ReferenceEncoder(second.encoder().tokenizer_json, 0)
    for part, value in json.loads(encoder._load().to_str()).items():
        assert part in ("truncation", "padding") or value == expected[part], part
    ids = truth(" a<bos> naïve", add_special_tokens=False).input_ids
    assert second.decode(ids) == truth.decode(ids, clean_up_tokenization_spaces=False)
    for number, tokenizer in enumerate((first, second)):
        saved = directory.parent / f"saved{number}"
        saved.mkdir()
        tokenizer.save(saved)
        again = AutoTokenizer.from_pretrained(saved)
        assert again.chat_template == truth.chat_template
        assert again("a b c d e f g").input_ids == truth("a b c d e f g").input_ids
        assert load_tokenizer(str(saved)).hash == first.hash
    files = [
        {path.name: path.read_bytes() for path in (directory.parent / name).iterdir()}
        for name in ("saved0", "saved1")
    ]
    assert files[0] == files[1]


@pytest.mark.slow
def test_the_second_load_is_without_transformers(directory: Path) -> None:
    program = (
        "import sys; from bigtrain.data.tokenizers.tokenizer import load_tokenizer as load;"
        "print(load(sys.argv[1]).encoder().encode(['a']).tokens, 'transformers' in sys.modules)"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, str(directory)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert outputs[0][:-1] == outputs[1][:-1]
    assert [words[-1] for words in outputs] == ["True", "False"]


def test_another_content_or_version_is_another_tokenizer(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokenizer(str(directory))
    key = fingerprint(directory, str(directory))
    assert key is not None
    assert get_cached_tokenizer(directory, key) is not None
    (directory / "model.safetensors").write_bytes(b"weights")
    assert fingerprint(directory, str(directory)) == key
    template(directory)
    assert fingerprint(directory, str(directory)) != key
    (directory / "chat_template.jinja").unlink()
    assert fingerprint(directory, str(directory)) == key
    assert fingerprint(directory, "another/name") != key
    monkeypatch.setattr(known.metadata, "distribution", Installed)
    assert fingerprint(directory, str(directory)) not in (key, None)
    monkeypatch.setattr(Installed, "editable", "true")
    assert fingerprint(directory, str(directory)) is None


def test_a_tokenizer_of_other_files_is_never_remembered(directory: Path) -> None:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])) + "\n")
    edit(CONFIG, tokenizer_class="GPT2Tokenizer")(directory)
    for _ in range(2):
        assert load_tokenizer(str(directory)).cached is None


def test_another_vocabulary_is_never_remembered(directory: Path) -> None:
    tree = json.loads((directory / "tokenizer.json").read_text())
    fewer = {**tree, "model": {**tree["model"], "merges": tree["model"]["merges"][:-1]}}
    assert _changes(json.dumps(fewer).encode(), _canonical(json.dumps(tree))) is None
    assert _changes(json.dumps(tree).encode(), _canonical(json.dumps(tree))) == {}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"hash": 1}', "\x00"])
def test_an_entry_that_is_none_is_ignored(directory: Path, empty_cache: Path, content: str) -> None:
    first = load_tokenizer(str(directory))
    (entry,) = (empty_cache / "tokenizers").iterdir()
    entry.write_text(content)
    second = load_tokenizer(str(directory))
    assert second.loaded is not None
    assert second.hash == first.hash
    assert load_tokenizer(str(directory)).loaded is None, "the entry was written again"


def test_a_cache_that_cannot_be_written(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "file"))
    assert [load_tokenizer(str(directory)).loaded is None for _ in range(2)] == [False, False]
    assert choose_encoder(load_tokenizer(str(directory)).encoder(), "auto").reason == ""


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BIGTRAIN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    known.cache_put("kind", "a", {"x": 1})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    known.cache_put("kind", "b", {"x": 2})
    assert known.cache_get("kind", "b") == {"x": 2}
    files = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*.json"))
    assert files == [".cache/bigtrain/kind/a.json", "xdg/bigtrain/kind/b.json"]


class Wrong(GigatokenEncoder):
    """Another class: what was proven of its base is not proven of it."""

    def encode_utf8(self, contents: Any) -> encoders.Encoded:
        return super().encode_utf8([content.replace(b"word", b"") for content in contents])


def test_the_hard_sample_is_compared_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load_tokenizer(str(directory)).encoder()
    calls = []
    original = encoder_checks.tokenizer_edge_cases
    monkeypatch.setattr(
        encoder_checks, "tokenizer_edge_cases", lambda t: calls.append(1) or original(t)
    )

    def fast(kind: type[GigatokenEncoder], parse: bool = False) -> GigatokenEncoder:
        return kind(reference.tokenizer_json, reference.end_of_document_id, parse)

    check_equivalence(fast(GigatokenEncoder), reference)
    check_equivalence(fast(GigatokenEncoder), reference)
    assert len(calls) == 1
    check_equivalence(fast(GigatokenEncoder, True), load_tokenizer(str(directory)).encoder(True))
    assert len(calls) == 2
    for number in (3, 4):
        with pytest.raises(encoders.EncoderError):
            check_equivalence(fast(Wrong), reference)
        assert len(calls) == number, "what differs is compared every time"
    monkeypatch.setattr(known.metadata, "distribution", Installed)
    check_equivalence(fast(GigatokenEncoder), reference)
    assert len(calls) == 5
    monkeypatch.setattr(Installed, "editable", "true")
    for number in (6, 7):
        check_equivalence(fast(GigatokenEncoder), reference)
        assert len(calls) == number, "it may have changed"
