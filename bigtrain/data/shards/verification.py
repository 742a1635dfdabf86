"""Verification of the files of datasets against the manifests' checksums, divided among ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.manifest import RESTORE
from bigtrain.data.shards.shard_table import read_table
from bigtrain.settings.run_config import DataSection
from bigtrain.system.files import file_checksum


class ListedShards:
    """Shards of all sources and splits, by number. num_bytes: token bytes, int64 [shards].

    Raises DataError if a manifest cannot be read; no other file is read.
    """

    def __init__(self, data: DataSection) -> None:
        self._parts = [
            (Path(source.path), columns)
            for source in data.mixture
            for columns in read_table(Path(source.path)).splits.values()
        ]
        sizes = [columns.rows["bytes"].astype(np.int64) for _, columns in self._parts]
        self.num_bytes: npt.NDArray[np.int64] = np.concatenate(sizes)
        self._ends = np.cumsum([len(columns) for _, columns in self._parts])
        # A shard has a .bin and an .idx, and optional files.
        self.num_files = sum(
            len(c) * (2 + c.is_masked + c.has_blocks + c.has_labels) + int(c.have_weights.sum())
            for _, c in self._parts
        )

    def files(self, number: int) -> list[tuple[Path, str]]:
        """Return the files of shard `number`, each with the checksum in its manifest."""
        part = int(np.searchsorted(self._ends, number, side="right"))
        directory, columns = self._parts[part]
        row = number - int(self._ends[part]) + len(columns)
        prefix, checksums = directory / columns.name(row), columns.checksums(row)
        return [(Path(f"{prefix}.{suffix}"), xxh3) for suffix, xxh3 in checksums.items()]

    def problems(self, number: int) -> list[str]:
        """Return a text for each missing or corrupt file of shard `number`; read every file."""
        problems = []
        for path, listed in self.files(number):
            try:
                checksum = file_checksum(path)
            except OSError as error:
                problems.append(f"{path} cannot be read: {error.strerror or error}")
                continue
            if checksum != listed:
                problems.append(
                    f"{path} is corrupt: its checksum differs from the manifest's: it is "
                    f"{checksum}, the manifest lists {listed}"
                )
        return problems


def rank_slice(sizes: Sequence[int], rank: int, world_size: int) -> list[int]:
    """Return the indices of the items that `rank` reads; all ranks read about equally many
    bytes."""
    numbers_by_rank: list[list[int]] = [[] for _ in range(world_size)]
    rank_loads = [(0, owner_rank) for owner_rank in range(world_size)]
    # The largest items first, each for the rank with the least load.
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        load, owner_rank = rank_loads[0]
        numbers_by_rank[owner_rank].append(number)
        heapq.heapreplace(rank_loads, (load + sizes[number], owner_rank))
    return numbers_by_rank[rank]


def corrupt_files(path: str | Path) -> list[str]:
    """Return a text for each missing or corrupt file of the dataset in directory `path`. Reads all
    files. Raises DataError for anything but a dataset."""
    shards = ListedShards(DataSection(path=str(path)))
    problems = map(shards.problems, range(len(shards.num_bytes)))
    return [f"{text} -> {RESTORE}" for texts in problems for text in texts]
