"""Positioned reads: the right tokens, few open files, and clear errors."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bigtrain.data.shards.dataset import MAX_OPEN_FILES, FileReader, open_dataset
from bigtrain.errors import DataError
from tests.support.datasets import write_dataset


def read(reader: FileReader, number: int, position: int, size: int) -> bytes:
    out = bytearray(size)
    reader.read([number], [position], memoryview(out), [0], [size])
    return bytes(out)


def num_open_files(directory: Path) -> int:
    """Files below `directory` that this process has open. Files of earlier tests may close now."""
    descriptors = os.listdir("/proc/self/fd")
    targets = [os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in descriptors]
    return sum(Path(target).is_relative_to(directory) for target in targets)


def test_reads_what_the_files_hold_with_few_of_them_open(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(MAX_OPEN_FILES + 20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(range(number, number + 50)))
    reader = FileReader(paths.__getitem__)
    for _ in range(2):
        for number in range(len(paths)):
            assert read(reader, number, 40, 7) == bytes(range(number + 40, number + 47))
    assert num_open_files(tmp_path) == MAX_OPEN_FILES
    # In one call, more files than may stay open.
    out = bytearray(2 * len(paths))
    numbers = list(range(len(paths)))
    places = [2 * number for number in reversed(numbers)]
    ends = [place + 2 for place in places]
    reader.read(numbers, [3] * len(paths), memoryview(out), places, ends)
    assert list(out) == [n + k for n in reversed(numbers) for k in (3, 4)]
    assert num_open_files(tmp_path) == MAX_OPEN_FILES
    del reader
    assert num_open_files(tmp_path) == 0


def test_threads_read_at_once(tmp_path: Path) -> None:
    """More files than may stay open: what one thread evicts, another may be reading from."""
    paths = [tmp_path / str(number) for number in range(MAX_OPEN_FILES * 2)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    reader = FileReader(paths.__getitem__)

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(paths), 1000).tolist():
            assert read(reader, number, 50, 20) == bytes([number]) * 20

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, seed) for seed in range(4)]:
            done.result()


def test_a_file_that_shrinks_or_goes_away_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    path.write_bytes(bytes(90))
    reader = FileReader([path].__getitem__)
    with pytest.raises(
        DataError, match=r"s\.bin ends at byte 90; it was longer when it was opened"
    ):
        read(reader, 0, 80, 20)
    path.unlink()
    with pytest.raises(DataError, match=r"s\.bin cannot be read: .*No such file"):
        read(FileReader([path].__getitem__), 0, 0, 10)


def test_opening_maps_nothing(tmp_path: Path) -> None:
    """So a dataset of any number of documents opens in the time of its headers."""
    dataset = open_dataset(write_dataset(tmp_path / "d", vocab_size=50), check="sizes")
    for split in ("train", "held_out"):
        for shard in dataset.shards(split):  # type: ignore[arg-type]
            assert not {"tokens", "sequence_lengths", "sequence_pointers"} & shard.__dict__.keys()
