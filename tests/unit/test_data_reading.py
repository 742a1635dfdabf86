"""Positioned reads: the right tokens, few open files, and clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bigtrain.data.reading import MAX_OPEN_FILES, TokenReader
from bigtrain.data.shards import Shard, ShardWriter, open_dataset
from bigtrain.errors import DataError
from tests.support.datasets import write_dataset
from tests.support.worlds import ROOT


def write_shard(directory: Path, name: str, tokens: np.ndarray) -> Shard:
    with ShardWriter(directory, name, "uint16") as writer:
        writer.add(tokens, np.array([len(tokens)]), 0)
        writer.close()
    return Shard(directory / name)


def test_reads_what_the_map_holds_with_few_files_open(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path, f"s{number}", np.arange(number, number + 50))
        for number in range(MAX_OPEN_FILES + 20)
    ]
    reader = TokenReader(1000)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for number, shard in enumerate(shards):
            out = np.full(7, -1, dtype=np.int64)
            reader.read_into(shard, 40, out)
            assert out.tolist() == list(range(number + 40, number + 47))
    assert len(os.listdir("/proc/self/fd")) - before == MAX_OPEN_FILES
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_shrinks_or_goes_away_is_an_error(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, "s", np.arange(50))
    reader = TokenReader(50)
    os.truncate(shard.bin_path, 90)
    with pytest.raises(DataError, match=r"s\.bin ends at byte 90; it had 100 bytes when it was"):
        reader.read_into(shard, 40, np.zeros(10, np.int64))
    shard.bin_path.unlink()
    with pytest.raises(DataError, match=r"s\.bin cannot be read: .*No such file"):
        TokenReader(50).read_into(shard, 0, np.zeros(10, np.int64))


def test_a_token_beyond_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, "s", np.arange(50))
    with pytest.raises(DataError, match=r"s\.bin is damaged: one of the tokens 40 to 50 is 40 or"):
        TokenReader(45).read_into(shard, 40, np.zeros(10, np.int64))


def test_opening_maps_nothing(tmp_path: Path) -> None:
    """So a dataset of any number of documents opens in the time of its headers."""
    dataset = open_dataset(write_dataset(tmp_path / "d", vocab_size=50), check="sizes")
    for split in ("train", "held_out"):
        for shard in dataset.shards(split):  # type: ignore[arg-type]
            assert not {"tokens", "sequence_lengths", "sequence_pointers"} & shard.__dict__.keys()


def test_the_benchmark_runs(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "loader.py"
    result = subprocess.run(
        [sys.executable, str(script), "--tiny", "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert '"2e+09 tokens in 2e+06 documents, sparse"' in result.stdout
    assert not list(tmp_path.iterdir())
