"""The loss mask beside the tokens: its bytes, and what becomes of corrupt files."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.manifest import (
    MANIFEST_NAME,
    Manifest,
    OptionsRecord,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)
from bigtrain.data.shards.verification import corrupt_files
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.errors import DataError
from tests.support.datasets import open_verified
from tests.support.tiers import examples

# Documents [5, 6, 7, 8, 9], [1, 2, 3] and [4, 4]: bits from the lowest, zeros after the last.
MASK = [0, 1, 1, 0, 1, 0, 0, 1, 0, 1]
EXPECTED_MASK = bytes([0b10010110, 0b00000010])


def write_masked(directory: Path) -> Path:
    directory.mkdir()
    with ShardWriter(directory, "train-00000", "uint16", masked=True) as writer:
        bits = np.array(MASK, bool)
        writer.add(np.array([5, 6, 7, 8, 9]), np.array([5, 0]), 5, mask=bits[:5])
        writer.add(np.array([1, 2, 3]), np.array([3]), 3, mask=bits[5:8])
        writer.add(np.array([4, 4]), np.array([2]), 2, mask=bits[8:])
        record = writer.close()
    manifest = Manifest(
        tokenizer=TokenizerRecord(
            name="none", hash="0" * 16, vocab_size=10, end_of_document_id=0, engine="none"
        ),
        token_dtype="uint16",
        sources=(),
        options=OptionsRecord(),
        splits={"train": (record,)},
    )
    write_manifest(directory, manifest)
    return directory


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_masked(tmp_path_factory.mktemp("masks") / "set")


@pytest.fixture
def copy(masked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(masked, tmp_path / "copy"))


def test_bytes(masked: Path) -> None:
    assert (masked / "train-00000.mask").read_bytes() == EXPECTED_MASK
    manifest = read_manifest(masked)
    assert manifest.is_masked
    assert manifest.shards("train")[0].target_tokens == sum(MASK)
    shard = open_verified(masked).shards("train")[0]
    bits = np.unpackbits(shard.mask_bytes, bitorder="little", count=shard.num_tokens)
    assert bits.tolist() == MASK


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 40), max_size=8), seed=st.integers(0, 99))
def test_any_division_gives_the_same_bytes(tmp_path: Path, cuts: list[int], seed: int) -> None:
    mask = np.random.default_rng(seed).random(40) < 0.5
    bounds = [0, *sorted(cuts), 40]
    with ShardWriter(tmp_path, "x", "uint16", masked=True) as writer:
        for low, high in itertools.pairwise(bounds):
            tokens = np.zeros(high - low, np.int64)
            writer.add(tokens, np.array([high - low]), 0, mask=mask[low:high])
        assert writer.close().target_tokens == mask.sum()
    written = (tmp_path / "x.mask").read_bytes()
    assert written == np.packbits(mask, bitorder="little").tobytes()


def test_plain_datasets_say_nothing_of_masks(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train-00000", "uint16") as writer:
        writer.add(np.array([5]), np.array([1]), 1)
        record = writer.close()
    assert not (tmp_path / "train-00000.mask").exists()
    manifest = read_manifest(write_masked(tmp_path / "other")).model_copy(
        update={"splits": {"train": (record,)}}
    )
    write_manifest(tmp_path, manifest)
    assert "mask" not in (tmp_path / MANIFEST_NAME).read_text()
    assert not open_verified(tmp_path).manifest.is_masked


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_mask_is_refused(copy: Path, data: st.DataObject) -> None:
    content = bytearray(EXPECTED_MASK)
    action = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if action == "flip":
        content[data.draw(st.integers(0, 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif action == "cut":
        del content[data.draw(st.integers(0, 1)) :]
    else:
        content += data.draw(st.binary(min_size=1, max_size=9))
    (copy / "train-00000.mask").write_bytes(content)
    if action == "flip":
        open_dataset(copy, check="sizes")
        (problem,) = corrupt_files(copy)
        assert "train-00000.mask is corrupt: its checksum" in problem
    else:
        with pytest.raises(DataError, match=r"\.mask is corrupt: \d+ bytes, 10 tokens have 2"):
            open_dataset(copy, check="sizes")


def test_missing_mask_is_refused(copy: Path) -> None:
    (copy / "train-00000.mask").unlink()
    with pytest.raises(DataError, match=r"train-00000\.mask cannot be read: No such file"):
        open_dataset(copy, check="sizes")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_tokens": None}, "mask_xxh3 and target_tokens must be given together"),
        ({"mask_xxh3": None}, "mask_xxh3 and target_tokens must be given together"),
        ({"target_tokens": 11}, "11 of 10 tokens are targets"),
    ],
)
def test_manifest_contradicts_itself(copy: Path, changes: dict[str, object], message: str) -> None:
    tree = json.loads((copy / MANIFEST_NAME).read_text())
    (shard,) = tree["splits"]["train"]
    plain = {key: value for key, value in shard.items() if key != "target_tokens"}
    plain = {**plain, "mask_xxh3": None, "name": "train-00001"}
    (copy / MANIFEST_NAME).write_text(json.dumps({**tree, "splits": {"train": [shard, plain]}}))
    with pytest.raises(DataError, match="some shards have a mask and others do not"):
        open_dataset(copy)
    shard.update(changes)
    (copy / MANIFEST_NAME).write_text(json.dumps(tree))
    with pytest.raises(DataError, match=f"manifest.json is corrupt: splits.train.0: {message}"):
        open_dataset(copy)
