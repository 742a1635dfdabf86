"""What is read of shards is verified as it is read: any bit of any file, whoever reads it."""

from __future__ import annotations

import shutil
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.loading.dataset_checks import check_datasets
from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.data.shards.block_checksums import BLOCK_BYTES, BlockHasher, read_blocks
from bigtrain.data.shards.dataset import TokenDataset, open_dataset, open_sources
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.data.shards.verification import corrupt_files
from bigtrain.errors import DataError
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from tests.support.datasets import forget_blocks, write_dataset
from tests.support.run_trees import run_config
from tests.support.tiers import examples

LENGTH, SAMPLES = 64, 16
MODES: dict[str, dict[str, Any]] = {
    "concatenated": {},
    "isolated": {"document_boundaries": "isolate"},
    "packed": {"packing": "best_fit"},
}


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of several blocks of tokens and one of the mask."""
    path = tmp_path_factory.mktemp("blocks") / "d"
    return write_dataset(path, vocab_size=97, num_documents=1200, masked=True)


@pytest.fixture
def copy(masked: Path, tmp_path: Path) -> Path:
    without_plans = shutil.ignore_patterns("plans")
    return Path(shutil.copytree(masked, tmp_path / "copy", ignore=without_plans))


def flip(path: Path, bit: int) -> None:
    """In place: a file that is written whole is short for a moment, and another thread may read."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def run_of(path: Path, mode: str) -> RunConfig:
    batch = {"sequence_length": LENGTH, "global_batch_size": SAMPLES}
    return run_config(data={"path": str(path), **MODES[mode]}, batch=batch)


def read_epoch(path: Path, mode: str, datasets: tuple[TokenDataset, ...] | None = None) -> None:
    """All training samples, and the held-out ones, as a run reads them."""
    config = run_of(path, mode)
    plan = BatchPlan(SAMPLES, SAMPLES, 1, 1, LENGTH)
    datasets = datasets or open_sources(config.data)
    with closing(open_training_data(config, plan, 0, datasets=datasets)) as batches:
        for first in range(0, batches.dataset.num_samples + SAMPLES, SAMPLES):
            batches.step(first)
    for held_out in open_held_out(config, plan, 0, datasets=datasets):
        assert list(held_out.batches)


@pytest.mark.parametrize("mode", ["isolated"])
def test_what_is_whole_is_read(masked: Path, mode: str) -> None:
    assert (masked / "train_00000.bin").stat().st_size > 4 * BLOCK_BYTES
    read_epoch(masked, mode)
    read_epoch(masked, mode, (open_dataset(masked),))
    assert corrupt_files(masked) == []


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        *(("concatenated", suffix) for suffix in ("bin", "blocks")),  # not idx: nobody looks at it
        *(("isolated", suffix) for suffix in ("idx", "mask")),
        *(("packed", suffix) for suffix in ("bin", "mask", "idx")),
    ],
)
def test_any_flipped_bit_is_found_by_default(copy: Path, mode: str, suffix: str) -> None:
    """Eight places of each file, spread over all of it, the first and the last bit among them."""
    path = copy / f"train_00000.{suffix}"
    if suffix != "idx":
        read_epoch(copy, mode)  # keeps the plan of packed documents: nobody looks into the index
    num_bits = 8 * path.stat().st_size
    if suffix == "bin":  # what is after the last sample belongs to none
        num_bits = 16 * ((num_bits // 16 - 1) // LENGTH * LENGTH)
    for bit in np.linspace(0, num_bits - 1, 8).astype(int).tolist():
        flip(path, bit)
        with pytest.raises(DataError, match=rf"{path} .*is corrupt: .* -> ") as raised:
            read_epoch(copy, mode)
        if suffix in ("bin", "mask"):
            low = bit // 8 // BLOCK_BYTES * BLOCK_BYTES
            assert f"bytes {low} to " in str(raised.value)
        flip(path, bit)
    read_epoch(copy, mode)


def test_zeroed_index_block_is_found_before_a_process_group(copy: Path) -> None:
    """Where documents are packed the index is read for the plan, before anything starts."""
    path = copy / "train_00000.idx"
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    path.write_bytes(content)
    config = run_of(copy, "packed")
    (problem,) = check_datasets(config, open_sources(config.data)).problems
    assert f"{path} is corrupt: the checksum of bytes 0 to {len(content)} is" in str(problem)


def test_files_of_another_dataset_of_the_same_size(copy: Path) -> None:
    """Each is whole in itself, checksums of blocks included: the manifest tells."""
    content = np.fromfile(copy / "train_00000.bin", "<u2")
    content[5] = 1 + content[5] % 90
    content.tofile(copy / "train_00000.bin")
    hasher = BlockHasher()
    hasher.update(memoryview(content.tobytes()))
    sums = bytearray((copy / "train_00000.blocks").read_bytes())
    sums[32:40] = hasher.finish()[:1].tobytes()
    (copy / "train_00000.blocks").write_bytes(sums)
    with pytest.raises(DataError, match=r"train_00000\.blocks is corrupt: its checksum is"):
        read_epoch(copy, "concatenated")


def test_a_block_is_verified_once(copy: Path) -> None:
    """What changes later is seen by whoever opens the dataset next."""
    datasets = open_sources(run_of(copy, "concatenated").data)
    config, plan = run_of(copy, "concatenated"), BatchPlan(SAMPLES, SAMPLES, 1, 1, LENGTH)
    with closing(open_training_data(config, plan, 0, datasets=datasets)) as batches:
        steps = range(0, 2 * batches.dataset.num_samples, SAMPLES)
        for first in steps[: len(steps) // 2 + 1]:
            batches.step(first)
        flip(copy / "train_00000.bin", 0)
        for first in steps[len(steps) // 2 + 1 :]:
            batches.step(first)
    with pytest.raises(DataError, match=f"bytes 0 to {BLOCK_BYTES} do not have the checksum"):
        read_epoch(copy, "concatenated")


def test_datasets_without_checksums_of_blocks_are_read(copy: Path) -> None:
    manifest = read_manifest(forget_blocks(copy))
    assert not manifest.has_blocks
    for mode in MODES:
        read_epoch(copy, mode)


def test_a_missing_file_of_checksums_is_refused_at_once(copy: Path) -> None:
    (copy / "train_00000.blocks").unlink()
    with pytest.raises(DataError, match=r"train_00000\.blocks cannot be read: No such file"):
        open_dataset(copy, check="sizes")


@settings(max_examples=examples(100))
@given(
    num_bytes=st.integers(0, 3 * BLOCK_BYTES + 1),
    cuts=st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=5),
)
def test_any_division_gives_the_same_checksums(num_bytes: int, cuts: list[int]) -> None:
    content = np.random.default_rng(0).bytes(num_bytes)
    hasher = BlockHasher()
    edges = sorted([0, num_bytes, *(min(place, num_bytes) for place in cuts)])
    for low, high in pairwise(edges):
        hasher.update(memoryview(content)[low:high])
    assert hasher.finish().tolist() == [
        xxhash.xxh3_64_intdigest(content[low : low + BLOCK_BYTES])
        for low in range(0, num_bytes, BLOCK_BYTES)
    ]


def test_checksums_of_another_shard_are_refused(masked: Path) -> None:
    path = masked / "train_00000.blocks"
    listed = read_manifest(masked).splits["train"][0].blocks_xxh3
    assert listed is not None
    with pytest.raises(DataError, match="belongs to another shard"):
        read_blocks(path, listed, BLOCK_BYTES, 0)
