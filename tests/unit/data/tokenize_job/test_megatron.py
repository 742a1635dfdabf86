"""Files as Megatron's `preprocess_data.py` writes them become a dataset where they are."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bigtrain
from bigtrain.cli import main
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.tokenize_job import megatron
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import DataError
from tests.support.chats import trained_tokenizer
from tests.support.datasets import files_of, open_verified

CODES = {"uint16": 8, "int32": 4, "int64": 5}


def write_pair(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str) -> None:
    """Write a pair as Megatron-LM's ``IndexedDatasetBuilder``: `documents` of sequences of ids.

    Written from the description of the format (megatron/core/datasets/indexed_dataset.py), without
    bigtrain's writer.
    """
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    size = np.dtype(dtype).itemsize
    pointers = [size * sum(lengths[:number]) for number in range(len(lengths))]
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + len(document))
    ids = [token for sequence in sequences for token in sequence]
    prefix.with_name(f"{prefix.name}.bin").write_bytes(np.array(ids, dtype).tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype])
    header += struct.pack("<QQ", len(lengths), len(starts))
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(starts, "<i8"))
    content = header + b"".join(array.tobytes() for array in arrays)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(content)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "made_by"
    trained_tokenizer().save_pretrained(str(directory))
    return directory


@pytest.fixture
def corpus(tmp_path: Path, tokenizer: Path) -> Path:
    """A prefix of six documents; some of several sequences, one of none, as Megatron allows."""
    end = load_tokenizer(str(tokenizer)).end_of_document_id
    documents = [[[5, 6, 7, end]], [[8, 9], [10, end]], [], [[11, end]], [[12] * 9, [end]], [[end]]]
    (tmp_path / "data").mkdir()
    write_pair(tmp_path / "data" / "corpus_text_document", documents, "uint16")
    return tmp_path / "data" / "corpus_text_document"


def test_a_pair_is_a_dataset_where_it_is(
    corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = load_tokenizer(str(tokenizer)).end_of_document_id
    write_pair(corpus.with_name("valid"), [[[20, 21, end]]], "uint16")
    before = {name: (corpus.parent / name).stat() for name in files_of(corpus.parent)}
    words = ["manifest", f"{corpus}.bin", "--tokenizer", str(tokenizer), "--held-out"]
    assert main([*words, str(corpus.with_name("valid"))]) == 0
    printed = capsys.readouterr().out
    assert f"--data {corpus.parent}" in printed
    dataset = open_verified(corpus.parent)
    assert dataset.table.has_blocks
    assert (len(dataset), dataset.table.num_tokens("train")) == (6, 21)
    assert [len(document["input_ids"]) for document in dataset] == [4, 4, 0, 2, 10, 1]
    assert dataset[1]["input_ids"].tolist() == [8, 9, 10, end]
    assert dataset.documents("held_out")[0]["input_ids"].tolist() == [20, 21, end]
    assert load_tokenizer(str(dataset.tokenizer_path)).hash == dataset.manifest.tokenizer.hash
    # The pairs are where and what they were.
    for name, status in before.items():
        now = (corpus.parent / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    # A flipped bit is found, in each file.
    for name in before:
        path = corpus.parent / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match=name):
            bigtrain.verify_shards(corpus.parent)
        path.write_bytes(content)


def test_it_holds_what_bigtrain_would_have_written(tmp_path: Path, tokenizer: Path) -> None:
    """The same text by `tokenize`: the same bytes, and the manifest that it wrote."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "the cat sat"}\n{"text": "on the mat"}\n')
    written = bigtrain.tokenize(texts, tokenizer, tmp_path / "written")
    folder = tmp_path / "data"
    folder.mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(tmp_path / "written" / f"train-00000.{suffix}", folder / f"corpus.{suffix}")
    adopted = bigtrain.make_manifest([folder / "corpus"], tokenizer)
    [expected_blocks], [blocks] = (path.glob("*.blocks") for path in (written.path, folder))
    assert blocks.read_bytes() == expected_blocks.read_bytes()
    expected_record = written.manifest.splits["train"][0].model_dump()
    record = adopted.manifest.splits["train"][0].model_dump()
    assert record == {**expected_record, "name": "corpus", "text_bytes": 0}
    for name in ("hash", "vocab_size", "end_of_document_id", "beginning_ids"):
        expected = getattr(written.manifest.tokenizer, name)
        assert getattr(adopted.manifest.tokenizer, name) == expected


def test_a_killed_command_continues(corpus: Path, tokenizer: Path) -> None:
    shutil.copytree(tokenizer, corpus.parent / "tokenizer")
    corpus.with_name(f"{corpus.name}.blocks").write_bytes(b"half")
    assert len(bigtrain.make_manifest([corpus], tokenizer)) == 6
    assert read_manifest(corpus.parent).tokenizer.name == str(tokenizer)


def test_ends_of_documents_are_those_that_are_there(corpus: Path, tokenizer: Path) -> None:
    loaded = load_tokenizer(str(tokenizer))
    write_pair(corpus, [[[5, 6, 9]], [[7, 9]]], "uint16")
    token = loaded.decode([9])
    with pytest.raises(DataError, match=r"2 of 2 documents do not end with .* --end-of-document '"):
        bigtrain.make_manifest([corpus], tokenizer)
    dataset = bigtrain.make_manifest([corpus], tokenizer, end_of_document=token)
    assert dataset.manifest.tokenizer.end_of_document_id == 9
    (corpus.parent / "manifest.json").unlink()
    write_pair(corpus, [[[5, 6]], [[7, 8]]], "uint16")
    with pytest.raises(DataError, match=r"2 of 2 documents do not .* --without-end-of-document if"):
        bigtrain.make_manifest([corpus], tokenizer)
    dataset = bigtrain.make_manifest([corpus], tokenizer, without_end_of_document=True)
    assert dataset.manifest.tokenizer.end_of_document_id == loaded.end_of_document_id


def other_directory(corpus: Path, end: int) -> list[Path]:
    (corpus.parent / "more").mkdir()
    write_pair(corpus.parent / "more" / "b", [[[5, end]]], "uint16")
    return [corpus, corpus.parent / "more" / "b"]


def other_type(corpus: Path, end: int) -> list[Path]:
    write_pair(corpus.with_name("b"), [[[5, end]]], "int32")
    return [corpus, corpus.with_name("b")]


def unread_type(corpus: Path, end: int) -> list[Path]:
    write_pair(corpus, [[[5, end]]], "int64")
    return [corpus]


def large_id(corpus: Path, end: int) -> list[Path]:
    write_pair(corpus, [[[5, end]], [[6, 60_000, end]]], "uint16")
    return [corpus]


def negative_id(corpus: Path, end: int) -> list[Path]:
    write_pair(corpus, [[[5, -3, end]]], "int32")
    return [corpus]


def a_gap(corpus: Path, end: int) -> list[Path]:
    write_pair(corpus, [[[5, end]], [[6, end]]], "uint16")
    path = corpus.with_name(f"{corpus.name}.bin")
    path.write_bytes(path.read_bytes() + b"\0\0")
    return [corpus]


def already(corpus: Path, end: int) -> list[Path]:
    corpus.with_name("manifest.json").write_text("{}")
    return [corpus]


def other_tokenizer(corpus: Path, end: int) -> list[Path]:
    loaded = trained_tokenizer()
    loaded.add_tokens(["zzz"])
    loaded.save_pretrained(str(corpus.parent / "tokenizer"))
    return [corpus]


def odd_name(corpus: Path, end: int) -> list[Path]:
    write_pair(corpus.with_name("a b"), [[[5, end]]], "uint16")
    return [corpus.with_name("a b")]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (other_directory, "the pairs are in 2 directories"),
        (other_type, r"different types \(corpus_text_document.bin uint16, b.bin int32\)"),
        (unread_type, "has tokens of int64; a run reads uint16 and int32"),
        (large_id, "token 3 is 60000, and tokenizer .* has .* ids -> name the tokenizer that made"),
        (negative_id, "token 1 is -3"),
        (a_gap, "its sequences have 8 bytes, corpus_text_document.bin has 10"),
        (already, "the directory is a dataset already"),
        (other_tokenizer, "is another tokenizer than"),
        (odd_name, "the name of a shard has letters"),
        (lambda corpus, end: [corpus, corpus], "is given 2 times"),
        (lambda corpus, end: [corpus.with_name("nothing")], "nothing.idx cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    corpus: Path,
    tokenizer: Path,
    make: Callable[[Path, int], Any],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(megatron, "READ_BYTES", 4)  # positions are counted over several reads
    shards = make(corpus, load_tokenizer(str(tokenizer)).end_of_document_id)
    before = files_of(corpus.parent)
    with pytest.raises(DataError, match=problem):
        bigtrain.make_manifest(shards, tokenizer)
    assert files_of(corpus.parent) == before
