"""The columns of shards say what the manifest has, also where a rank maps them from a file."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest

from bigtrain.data.samples.phases import data_hash
from bigtrain.data.shards import dataset as dataset_module
from bigtrain.data.shards import shard_table
from bigtrain.data.shards.dataset import ShardList, open_dataset
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.shards.shard_table import read_table
from bigtrain.errors import DataError
from bigtrain.settings.run_config import DataSection
from tests.support.datasets import forget_blocks, write_dataset


@pytest.fixture(params=["parsed", "mapped"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A small manifest is parsed; a large one's table is a file."""
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    if request.param == "mapped":
        monkeypatch.setattr(shard_table, "MIN_MANIFEST_BYTES", 0)
    return str(request.param)


def assert_same(directory: Path) -> None:
    manifest, table = read_manifest(directory), read_table(directory)
    assert table.tokenizer == manifest.tokenizer
    assert table.token_dtype == manifest.token_dtype
    assert table.is_masked == manifest.is_masked
    assert table.has_blocks == manifest.has_blocks
    assert table.splits.keys() == manifest.splits.keys()
    for split, columns in table.splits.items():
        records = manifest.splits[split]
        assert [columns.name(number) for number in range(len(columns))] == [r.name for r in records]
        sums = [columns.checksums(number) for number in range(len(columns))]
        assert sums == [record.checksums for record in records]
        for name in ("tokens", "documents", "bytes"):
            assert columns.rows[name].tolist() == [getattr(record, name) for record in records]
        assert table.num_tokens(split) == manifest.num_tokens(split)
        assert table.num_documents(split) == manifest.num_documents(split)


@pytest.mark.parametrize("masked", [False, True])
def test_the_table_is_the_manifest(tmp_path: Path, how: str, *, masked: bool) -> None:
    directory = write_dataset(tmp_path / "data", vocab_size=50, seed=1, masked=masked, num_shards=3)
    for _ in range(2):  # made, then read
        assert_same(directory)
    assert_same(forget_blocks(directory))  # another manifest is another table
    files = sorted(path.suffix for path in (directory / "tables").glob("*"))
    assert files == ([".shards"] * 2 if how == "mapped" else [])


def test_a_torn_table_is_made_again(tmp_path: Path, how: str) -> None:
    directory = write_dataset(tmp_path / "data", vocab_size=50, seed=1)
    read_table(directory)
    if how == "mapped":
        [path] = (directory / "tables").iterdir()
        content = path.read_bytes()
        for wrong in (
            b"",
            content[:-1],
            content[:40],
            bytes([content[0] ^ 1]) + content[1:],
            content[:-1] + bytes([content[-1] ^ 1]),
        ):
            path.write_bytes(wrong)
            assert_same(directory)
            assert path.read_bytes() == content


def test_where_the_dataset_cannot_be_written_the_cache_is(tmp_path: Path, how: str) -> None:
    directory = write_dataset(tmp_path / "data", vocab_size=50, seed=1)
    (directory / "tables").touch()
    assert_same(directory)
    assert (tmp_path / "cache" / "tables").exists() == (how == "mapped")


def test_the_identity_of_a_dataset_is_what_it_was(tmp_path: Path, how: str) -> None:
    """Of the text that the manifest's records gave before there were columns."""
    for masked, expected in ((False, "a"), (True, "b")):
        directory = write_dataset(tmp_path / expected, vocab_size=50, seed=1, masked=masked)
        opened = open_dataset(directory)
        shards = read_manifest(directory).shards("train")
        text = "".join(f"{s.tokens}:{s.xxh3}{s.mask_xxh3 or ''}" for s in shards)
        digest = shard_table.xxhash.xxh3_64_hexdigest((opened.table.tokenizer.hash + text).encode())
        assert data_hash(DataSection(path=str(directory)), [opened]) == digest


def test_many_shards_are_looked_at_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    directory = write_dataset(tmp_path / "data", vocab_size=50, seed=1)
    broken = next(directory.glob("train*.bin"))
    broken.write_bytes(broken.read_bytes()[:-2])
    with pytest.raises(DataError, match="bytes"):
        open_dataset(directory, "listed")
    monkeypatch.setattr(dataset_module, "MANY_SHARDS", 1)
    shards = open_dataset(directory, "listed").shards("train")
    with pytest.raises(DataError, match="the manifest has"):
        shards[0]
    for check, first in (("sizes", 64), ("index", 64), ("sizes", 0)):
        monkeypatch.setattr(dataset_module, "_FIRST_CHECKED", first)  # 0: in threads
        with pytest.raises(DataError, match="the manifest has"):
            open_dataset(directory, check)  # type: ignore[arg-type]


def test_no_more_shards_stay_open_than_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_dataset(tmp_path / "data", vocab_size=50, seed=1, num_shards=4)
    opened = open_dataset(directory, "sizes")
    monkeypatch.setattr(dataset_module, "MAX_OPEN_SHARDS", 2)
    shards = ShardList(directory, opened.table.splits["train"], opened.table.token_dtype)
    first = [shard.tokens.copy() for shard in shards]
    opened_shards = [weakref.ref(shard) for shard in shards]
    assert sum(shard() is not None for shard in opened_shards) == 2
    assert shards[3] is shards[-1]
    for shard, tokens in zip(shards, first, strict=True):
        np.testing.assert_array_equal(shard.tokens, tokens)
