"""Whether the files of datasets are what their manifests say, byte for byte, divided among many."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.data.shards.manifest import read_manifest
from bigtrain.settings.run_config import DataSection
from bigtrain.system.files import file_checksum


@dataclass(frozen=True)
class ListedFile:
    """A file of a dataset, its size in bytes, and the checksum that its manifest lists."""

    path: Path
    num_bytes: int
    xxh3: str


def listed_files(data: DataSection) -> list[ListedFile]:
    """The files of all sources and splits.

    Raises DataError where a manifest cannot be read. A file that is not there has size 0.
    """
    return [
        ListedFile(path, path.stat().st_size if path.exists() else 0, checksum)
        for source in data.mixture
        for path, checksum in _of_dataset(Path(source.path))
    ]


def _of_dataset(directory: Path) -> Iterator[tuple[Path, str]]:
    for shards in read_manifest(directory).splits.values():
        for shard in shards:
            for suffix, checksum in shard.checksums.items():
                yield directory / f"{shard.name}.{suffix}", checksum


def share_of(files: Sequence[ListedFile], rank: int, size: int) -> list[ListedFile]:
    """The files that process `rank` of `size` reads: about as many bytes as every other."""
    shares: list[list[ListedFile]] = [[] for _ in range(size)]
    loads = [(0, number) for number in range(size)]
    for file in sorted(files, key=lambda file: (-file.num_bytes, file.path)):
        load, number = heapq.heappop(loads)
        shares[number].append(file)
        heapq.heappush(loads, (load + file.num_bytes, number))
    return shares[rank]


def damage(files: Sequence[ListedFile]) -> list[str]:
    """What is wrong with `files`, one text for each that is; reads all of them."""
    found = []
    for file in files:
        try:
            checksum = file_checksum(file.path)
        except OSError as error:
            found.append(f"{file.path} cannot be read: {error.strerror or error}")
            continue
        if checksum != file.xxh3:
            found.append(f"{file.path}: its checksum is {checksum}, the manifest lists {file.xxh3}")
    return found


def corrupt_files(path: str | Path) -> list[str]:
    """What is wrong with each file of the dataset in directory `path`, by its checksum.

    Reads all of it. Raises DataError where there is no dataset.
    """
    problems = []
    for file, checksum in _of_dataset(Path(path)):
        try:
            if file_checksum(file) != checksum:
                problems.append(
                    f"{file} is corrupt: its checksum is not the manifest's -> tokenize again"
                )
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror or error}")
    return problems
