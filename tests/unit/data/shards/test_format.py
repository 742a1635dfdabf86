"""The shard format byte for byte, and what becomes of corrupt files."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.format import TokenShard, token_dtype
from bigtrain.data.shards.manifest import MANIFEST_NAME
from bigtrain.data.shards.verification import corrupt_files
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.errors import DataError
from tests.support.datasets import write_dataset
from tests.support.tiers import examples
from tools.unigram_entropy import token_counts, unigram_entropy

# By hand, from Megatron-LM's indexed_dataset.py: documents [5, 6, 0], none, [7, 0] of uint16.
EXPECTED_BIN = bytes.fromhex("0500 0600 0000 0700 0000")
EXPECTED_IDX = bytes.fromhex(
    "4d4d49444944580000"  # MMIDIDX and two zero bytes
    "0100000000000000"  # version
    "08"  # uint16
    "0200000000000000"  # sequences
    "0400000000000000"  # document entries
    "03000000 02000000"  # lengths
    "0000000000000000 0600000000000000"  # byte offsets
    "0000000000000000 0100000000000000 0100000000000000 0200000000000000"  # documents
)


def write_small(directory: Path, dtype: Any = "uint16") -> Path:
    with ShardWriter(directory, "small", dtype) as writer:
        writer.add(np.array([5, 6, 0]), np.array([3, 0]), 2)
        writer.add(np.array([7, 0]), np.array([2]), 1)
        record = writer.close()
    assert (record.documents, record.tokens, record.text_bytes) == (3, 5, 3)
    return directory / "small"


def test_bytes_are_megatrons(tmp_path: Path) -> None:
    write_small(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "small.bin", "small.blocks", "small.idx"
    ]  # fmt: skip
    assert (tmp_path / "small.bin").read_bytes() == EXPECTED_BIN
    assert (tmp_path / "small.idx").read_bytes() == EXPECTED_IDX


def test_int32_for_large_vocabularies(tmp_path: Path) -> None:
    assert [token_dtype(n) for n in (65_499, 65_500)] == ["uint16", "int32"]
    write_small(tmp_path, "int32")
    assert (tmp_path / "small.idx").read_bytes()[17] == 4
    assert np.fromfile(tmp_path / "small.bin", "<i4").tolist() == [5, 6, 0, 7, 0]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_deepspeed_reads_it(tmp_path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset

    if dtype == "uint16":
        # DeepSpeed's copy of the table has drifted from Megatron's, whose files these are.
        assert indexed_dataset.dtypes[8][0] is np.uint64
        monkeypatch.setitem(indexed_dataset.dtypes, 8, (np.uint16, None))
    prefix = write_small(tmp_path, dtype)
    dataset = indexed_dataset.MMapIndexedDataset(str(prefix), skip_warmup=True)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 0], [7, 0]]
    assert dataset.doc_idx.tolist() == [0, 1, 1, 2]


def test_reader_gives_documents_back(tmp_path: Path) -> None:
    shard = TokenShard(write_small(tmp_path))
    shard.check_index()
    assert [shard.document(i).tolist() for i in range(3)] == [[5, 6, 0], [], [7, 0]]
    with pytest.raises(DataError, match="has documents 0 to 2, not 3"):
        shard.document(3)


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    writing = ShardWriter(tmp_path, "x", "uint16", masked=True)
    with pytest.raises(KeyError), writing as writer:  # noqa: PT012
        writer.add(np.array([1]), np.array([1]), 1, mask=np.array([True]))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_index_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Any truncation, growth or bit flip either still gives the same documents or a DataError."""
    content = bytearray(EXPECTED_IDX)
    action = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if action == "flip":
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(
                st.integers(0, 7)
            )
    elif action == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content += data.draw(st.binary(min_size=1, max_size=20))
    (tmp_path / "x.bin").write_bytes(EXPECTED_BIN)
    (tmp_path / "x.idx").write_bytes(content)
    with suppress(DataError):
        shard = TokenShard(tmp_path / "x")
        for index in range(min(shard.num_documents, 10)):
            document = shard.document(index)
            assert document.nbytes <= len(EXPECTED_BIN)
    with suppress(DataError):
        shard = TokenShard(tmp_path / "x")
        shard.check_index()
        assert shard.num_tokens * shard.dtype.itemsize == len(EXPECTED_BIN)
        assert int(shard.sequence_lengths.sum()) == shard.num_tokens


@pytest.mark.parametrize("kept", [0, 1, 9])
def test_truncated_tokens_are_refused(tmp_path: Path, kept: int) -> None:
    write_small(tmp_path)
    (tmp_path / "small.bin").write_bytes(EXPECTED_BIN[:kept])
    with pytest.raises(DataError, match=r"small\.idx is corrupt"):
        TokenShard(tmp_path / "small").check_index()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", vocab_size=50)


@pytest.fixture
def corrupt(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def test_a_file_under_another_name_is_named(corrupt: Path) -> None:
    """Files of other shards, whose names are alike, are none."""
    path = corrupt / "train_00000.bin"
    shutil.copy(path, corrupt / "train_00001.bin")
    for other in ("train_00000.bin.old", "copy of train_00000.bin", "train_00000x.bin"):
        path.rename(corrupt / other)
        with pytest.raises(DataError, match=rf"No such file or directory -> rename {other} back, "):
            open_dataset(corrupt)
        (corrupt / other).rename(path)
    path.unlink()
    with pytest.raises(DataError, match="directory -> restore the file, or remove the dataset"):
        open_dataset(corrupt)


def test_files_that_this_user_may_not_read_are_refused_when_they_are_opened(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, who may read everything."""
    access = os.access
    unreadable = dataset / "train_00000.bin"
    monkeypatch.setattr(os, "access", lambda path, mode: path != unreadable and access(path, mode))
    with pytest.raises(DataError, match=r"train_00000\.bin cannot be read: Permission denied -> "):
        open_dataset(dataset)


def test_missing_directory_and_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing does not exist -> make it with `bigtrain tokeni"):
        open_dataset(tmp_path / "nothing")
    write_dataset(tmp_path / "others" / "shards", vocab_size=50)
    with pytest.raises(DataError, match=r"exist -> did you mean \S+/others/shards\? Or make it"):
        open_dataset(tmp_path / "others" / "shard")
    with pytest.raises(DataError, match=r"is not a finished token dataset: it has no manifest"):
        open_dataset(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a directory"):
        open_dataset(tmp_path / "file")


def test_missing_and_shortened_shards(corrupt: Path) -> None:
    shard = corrupt / "train_00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train_00000\.bin is corrupt: bytes .* the manifest has"):
        open_dataset(corrupt, check="sizes")
    shard.unlink()
    with pytest.raises(DataError, match=r"train_00000\.bin cannot be read: No such file"):
        open_dataset(corrupt)
    shard.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    open_dataset(corrupt)
    (problem,) = corrupt_files(corrupt)
    assert "train_00000.bin is corrupt: its checksum" in problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tree: tree["splits"].update(train=[]), "its training split has 0 tokens"),
        (lambda tree: tree.update(version=1), "has format version 1; this bigtrain reads 2"),
        *(
            (
                lambda tree, name=name: tree["splits"]["train"][0].update(name=name),
                r"manifest\.json is corrupt: splits\.train",
            )
            for name in ("../x", "/etc/passwd", "a/b", ".hidden", "")
        ),
    ],
)
def test_manifests_that_are_refused(corrupt: Path, change: Any, words: str) -> None:
    """A manifest names no files elsewhere."""
    tree = json.loads((corrupt / MANIFEST_NAME).read_text())
    change(tree)
    (corrupt / MANIFEST_NAME).write_text(json.dumps(tree))
    with pytest.raises(DataError, match=words):
        open_dataset(corrupt)


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_manifest_is_refused_or_harmless(corrupt: Path, data: st.DataObject) -> None:
    original = (corrupt / MANIFEST_NAME.replace("manifest", "original")).with_suffix(".keep")
    if not original.exists():
        original.write_bytes((corrupt / MANIFEST_NAME).read_bytes())
    content = bytearray(original.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (corrupt / MANIFEST_NAME).write_bytes(content)
    try:
        opened = open_dataset(corrupt)
    except DataError:
        return
    for split in ("train", "held_out"):
        tokens = sum(shard.num_tokens for shard in opened.shards(split))  # type: ignore[arg-type]
        assert tokens == opened.manifest.num_tokens(split)  # type: ignore[arg-type]


def test_unigram_entropy_is_the_formula(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.unigram_entropy.CHUNK_ITEMS", 7)
    opened = open_dataset(dataset)
    train, held_out = (
        np.concatenate([shard.tokens for shard in opened.shards(split)])
        for split in ("train", "held_out")
    )
    counts = [int((train == token).sum()) for token in range(50)]
    assert token_counts(opened, "train").tolist() == counts
    losses = [-np.log((counts[token] + 1) / (len(train) + 50)) for token in held_out]
    assert unigram_entropy(opened) == pytest.approx(np.mean(losses), rel=1e-12)
