"""`bigtrain inspect`: the figures are the dataset's, foreign shards are read, errors are clear."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.cli import main
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.format import HEADER, MAGIC, TokenShard
from bigtrain.data.shards.inspection import length_histogram
from bigtrain.data.tokenizers import equivalence
from bigtrain.data.tokenizers.encoders import EncoderError
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import DataError
from tests.support.datasets import write_dataset
from tests.support.tiers import examples
from tests.support.worlds import ROOT

TEXTS = ["naïve <|endoftext|> 東京", "", "b " * 700, *(f"document {n}" for n in range(40))]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspect")
    (root / "tokenizer").mkdir()
    train_tokenizer([TEXTS], 300).save(root / "tokenizer")
    lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
    (root / "in.jsonl").write_text("".join(lines))
    command = ["tokenize", "--input", root / "in.jsonl", "--tokenizer", root / "tokenizer"]
    command += ["--output", root / "d", "--held-out", "0.2", "--shard-size", "400"]
    assert main([*map(str, command)]) == 0
    return root / "d"


def write_foreign(
    prefix: Path, documents: Sequence[Sequence[int]], tokens: int | None = None
) -> Path:
    """As Megatron's builder does for documents of several sequences of these lengths."""
    lengths = [length for document in documents for length in document]
    ends = np.cumsum([0, *lengths])
    starts = np.cumsum([0, *(len(document) for document in documents)])
    content = HEADER.pack(MAGIC, 1, 4, len(lengths), len(starts))
    content += np.array(lengths, "<i4").tobytes() + (ends[:-1] * 4).astype("<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(content + starts.astype("<i8").tobytes())
    total = int(ends[-1]) if tokens is None else tokens
    np.arange(total, dtype="<i4").tofile(prefix.with_name(prefix.name + ".bin"))
    return prefix


def inspect_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["inspect", *map(str, words), "--json"]) == 0
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    return tree


def test_figures_are_the_datasets(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = inspect_json(capsys, dataset)
    opened = open_dataset(dataset)
    assert tree["tokenizer"]["hash"] == opened.manifest.tokenizer.hash
    assert tree["options"]["shard_bytes"] == 400
    for split, shards in opened.splits.items():
        lengths = [len(s.document(i)) for s in shards for i in range(s.num_documents)]
        part = tree["splits"][split]
        assert (part["documents"], part["tokens"]) == (len(lengths), sum(lengths))
        assert [s["name"] for s in part["shards"]] == [s.bin_path.stem for s in shards]
        statistics = part["lengths"]
        assert (statistics["min"], statistics["max"]) == (min(lengths), max(lengths))
        assert statistics["mean"] == pytest.approx(np.mean(lengths))
        for fraction, value in statistics["quantiles"].items():
            assert value == np.quantile(lengths, float(fraction), method="inverted_cdf")
        buckets = statistics["buckets"]
        assert sum(bucket["tokens"] for bucket in buckets) == sum(lengths)
        for bucket in buckets:
            inside = [n for n in lengths if bucket["low"] <= n <= bucket["high"]]
            assert bucket["documents"] == len(inside)


def test_documents_in_the_order_of_the_shards(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = open_dataset(dataset)
    shards = opened.shards("train")
    assert len(shards) > 1
    documents = [s.document(i).tolist() for s in shards for i in range(s.num_documents)]
    wanted = [len(documents) - 1, 0, 1, shards[0].num_documents]
    tree = inspect_json(capsys, dataset, "--document", *wanted, "--max-tokens", 100)
    assert [d["tokens"] for d in tree["documents"]] == [documents[n][:100] for n in wanted]
    assert [d["num_tokens"] for d in tree["documents"]] == [len(documents[n]) for n in wanted]
    ends = [d["text"].removesuffix("<|endoftext|>") for d in tree["documents"] if not d["cut"]]
    assert set(ends) <= set(TEXTS)
    held_out = inspect_json(capsys, dataset, "--document", 0, "--split", "held_out")
    assert held_out["documents"][0]["split"] == "held_out"


def test_for_people(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = next(
        n
        for n, document in enumerate(
            inspect_json(capsys, dataset, "--document", 0, 1, 2)["documents"]
        )
        if document["num_tokens"] > 100
    )
    assert main(["inspect", str(dataset), "--document", str(number), "--max-tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert f"\n--- document {number} of train (train-0000" in out
    assert "tokens, the first 3:\nb" in out
    assert "tokens per document: mean " in out
    assert "held_out: " in out
    assert "shard_bytes 400" in out


@pytest.mark.parametrize("copies", [1, 40])
def test_says_which_share_is_held_out_if_it_is_another_share(
    copies: int, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents with one text are in one split."""
    tokenizer = str(dataset.parent / "tokenizer")
    texts = tmp_path / "texts.jsonl"
    num_texts = 8000 // copies**2
    rows = [json.dumps({"text": f"text {number}"}) for number in range(num_texts)]
    texts.write_text("\n".join(rows * copies))
    words = ["--tokenizer", tokenizer, "--held-out", "0.3", "--output", str(tmp_path / "o")]
    assert main(["tokenize", "--input", str(texts), *words]) == 0
    out = capsys.readouterr().out
    assert ("held out, not 30.00%: each is selected by its text" in out) is (copies > 1)


def test_why_an_encoder_was_not_used_is_logged_once(
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the command that chose it; the manifest keeps the reason."""

    def differs(fast: object, reference: object) -> None:
        raise EncoderError("it differs")

    monkeypatch.setattr(equivalence, "check_equivalence", differs)
    command = ["tokenize", "--input", dataset.parent / "in.jsonl", "--output", tmp_path / "d"]
    command += ["--tokenizer", dataset.parent / "tokenizer", "--encoder", "fastokens"]
    assert main([*map(str, command)]) == 0
    output = capsys.readouterr()
    assert [
        "it differs; a slower one makes" in record.getMessage() for record in caplog.records
    ] == [True]
    assert "it differs" not in output.out
    assert inspect_json(capsys, tmp_path / "d")["tokenizer"]["engine_reason"].endswith("it differs")
    assert main(["inspect", str(tmp_path / "d")]) == 0
    assert "it differs" not in capsys.readouterr().out


def test_it_needs_neither_torch_nor_transformers(dataset: Path) -> None:
    program = (
        "import sys; from bigtrain.cli import main; main(sys.argv[1:]);"
        "print({'torch', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "inspect", str(dataset), "--document", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == "set()\n"


def test_a_shard_of_another_program(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_foreign(tmp_path / "a.b_text", [[3, 4], [], [1], [2, 2, 2]])
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        tree = inspect_json(capsys, name, "--document", 0, 3)
        assert tree["token_dtype"] == "int32"
        part = tree["splits"]["all"]
        assert (part["documents"], part["tokens"]) == (4, 14)
        assert part["shards"][0]["sequences"] == 6
        assert part["lengths"]["quantiles"]["0.5"] == 1
        assert [(b["low"], b["high"], b["documents"]) for b in part["lengths"]["buckets"]] == [
            *((0, 0, 1), (1, 1, 1), (2, 3, 0), (4, 7, 2))
        ]
        assert [d["tokens"] for d in tree["documents"]] == [[*range(7)], [*range(8, 14)]]
        assert tree["documents"][0]["text"] is None
    tokenizer = dataset / "tokenizer"
    tree = inspect_json(capsys, prefix, "--document", 0, "--tokenizer", tokenizer)
    assert tree["documents"][0]["text"].startswith("<|endoftext|>")
    assert main(["inspect", str(prefix)]) == 0
    assert "4 documents, 6 sequences, 14 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{empty}/none"], "none: neither a dataset directory nor a shard (none.idx is missing)"),
        (["{empty}"], "is not a finished token dataset: it has no manifest.json"),
        (["{d}", "--document", "-1"], "--document -1: {d} has documents 0 to "),
        (["{d}", "--document", "9999"], "--document 9999: {d} has documents 0 to "),
        (["{d}/train-00000", "--split", "train"], "a single shard has no splits"),
        (["{d}", "--tokenizer", "{empty}"], "it has no tokenizer.json"),
        (["{foreign}", "--document", "0", "--tokenizer", "{d}/tokenizer"], "token 300 is not in "),
    ],
)
def test_clear_errors(
    dataset: Path,
    tmp_path: Path,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    names = {
        "d": dataset,
        "empty": tmp_path / "empty",
        "foreign": write_foreign(tmp_path / "foreign", [[400]]),
    }
    assert main(["inspect", *(word.format(**names) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bigtrain inspect: ")
    assert message.format(**names) in captured.err


def test_no_such_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_dataset(tmp_path / "d", vocab_size=50)
    assert main(["inspect", str(directory), "--document", "0"]) == 0
    assert "--- document 0 of train (train_00000 0)" in capsys.readouterr().out
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["splits"]["held_out"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert main(["inspect", str(directory), "--document", "0", "--split", "held_out"]) == 2
    assert "--split held_out: " in capsys.readouterr().err


def test_corrupt_lengths(tmp_path: Path) -> None:
    prefix = write_foreign(tmp_path / "x", [[3], [5], [2]])
    content = bytearray((tmp_path / "x.idx").read_bytes())
    struct.pack_into("<i", content, HEADER.size, -3)
    (tmp_path / "x.idx").write_bytes(content)
    for one_sequence in (True, False):
        with pytest.raises(DataError, match=r"x\.idx is corrupt: a document has negative length"):
            length_histogram([TokenShard(prefix)], one_sequence)
    write_foreign(prefix, [[3], [5], [2]])
    content = bytearray((tmp_path / "x.idx").read_bytes())
    struct.pack_into("<q", content, len(content) - 24, 9)
    (tmp_path / "x.idx").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.idx is corrupt: documents after 0 are out of order"):
        length_histogram([TokenShard(prefix)], one_sequence=False)


@settings(max_examples=examples(60))
@given(
    documents=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=30),
    chunk=st.integers(1, 7),
)
def test_histogram_is_the_plain_count(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], chunk: int
) -> None:
    expected = sorted(map(sum, documents))
    shard = TokenShard(write_foreign(tmp_path_factory.mktemp("x") / "x", documents))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CHUNK_ITEMS", "MANY_SEQUENCES_CHUNK"):
            patch.setattr(f"bigtrain.data.shards.inspection.{name}", chunk)
        patch.setattr("bigtrain.data.shards.inspection.LONG_TOKENS", 10)
        histogram = length_histogram([shard], one_sequence=False)
        if all(len(document) < 2 and 0 not in document for document in documents):
            again = length_histogram([shard], one_sequence=True)
            assert again.lengths.tolist() == histogram.lengths.tolist()
            assert again.counts.tolist() == histogram.counts.tolist()
    assert np.repeat(histogram.lengths, histogram.counts).tolist() == expected
    for fraction in (0.0, 0.01, 0.5, 0.99, 1.0):
        plain = np.quantile(expected, fraction, method="inverted_cdf")
        assert histogram.quantile(fraction) == plain
