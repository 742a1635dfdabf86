"""Checksums of weight files: those that an export wrote, those that a run began with. No torch.

An export lists its files in `checksums.json`, as ``{file name: {"bytes": size, "xxh3": XXH3-64}}``.
A run that starts from pretrained weights records theirs in `base_model.json`, by absolute path, so
that a later launch that reads them again can compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import ModelError
from bigtrain.system.files import file_checksum, write_whole

CHECKSUMS = "checksums.json"
BASE_MODEL = "base_model.json"


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and XXH3-64 of a file, as 16 hexadecimal digits."""

    num_bytes: int
    xxh3: str


Sums = Mapping[str, FileSum]


def sum_of(path: Path) -> FileSum:
    """Size and checksum of a file, which is read completely. Raises ModelError if it cannot be."""
    try:
        return FileSum(path.stat().st_size, file_checksum(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def write_sums(path: Path, sums: Sums) -> None:
    """Write a list of checksums. Raises OSError."""
    tree = {name: {"bytes": s.num_bytes, "xxh3": s.xxh3} for name, s in sorted(sums.items())}
    write_whole(path, (json.dumps(tree, indent=2) + "\n").encode())


def read_sums(path: Path) -> Sums:
    """Read what `write_sums` wrote; empty without such a file.

    Raises ModelError if it cannot be read.
    """
    try:
        tree = json.loads(path.read_bytes())
        return {name: FileSum(int(s["bytes"]), str(s["xxh3"])) for name, s in tree.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error} -> restore it, or remove it") from error


def differences(found: Sums, listed: Sums, where: Path) -> list[str]:
    """How the files that were `found` differ from those `listed` in the file `where`."""
    return [
        f"{name} has {have.num_bytes} bytes and checksum {have.xxh3}; {where} lists "
        f"{listed[name].num_bytes} and {listed[name].xxh3}"
        for name, have in sorted(found.items())
        if name in listed and have != listed[name]
    ]


def corrupt_weights(directory: Path) -> tuple[int, list[str]]:
    """How many files `checksums.json` of a model's directory lists, and the corrupt ones.

    Raises ModelError without such a list.
    """
    listed = read_sums(directory / CHECKSUMS)
    if not listed:
        raise ModelError(
            f"{directory} has no {CHECKSUMS}, which `bigtrain export` writes -> nothing tells "
            "whether its files are corrupt"
        )
    return len(listed), differences(_sums(directory, listed), listed, directory / CHECKSUMS)


def write_checksums(directory: Path) -> None:
    """List the weights' files of an export in its `checksums.json`. Reads all of them."""
    names = [path.name for path in directory.glob("*.safetensors")]
    write_sums(directory / CHECKSUMS, _sums(directory, names))


def _sums(directory: Path, names: Iterable[str]) -> Sums:
    return {name: sum_of(directory / name) for name in names}
