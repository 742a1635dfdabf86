"""Finds the files and datasets that an input names, with their sizes and times.

What an input is, by its name without .gz, .zst, .xz or .bz2: ``.jsonl`` and ``.ndjson`` one JSON
object per line, ``.parquet``, ``.arrow``, ``.csv`` and ``.tsv`` a column, ``.json`` through
`datasets`, any other file one document as it stands (bytes decoded as UTF-8, nothing stripped or
translated). Of a compressed one the name says with what, not the content.
`bigtrain.data.documents.open_reader` reads them.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from bigtrain.data.shards.manifest import SourceRecord
from bigtrain.errors import DataError, first_line

logger = logging.getLogger(__name__)

DEFAULT_SUFFIXES = (".txt", ".jsonl", ".parquet")
COMPRESSION_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
LINE_SUFFIXES = (".jsonl", ".ndjson")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_TIMEOUT_S = 10.0

Kind = Literal[
    "text", "jsonl", "csv", "parquet", "arrow", "dataset_file", "saved_dataset", "hub_dataset"
]
KINDS: dict[str, Kind] = {
    **dict.fromkeys(LINE_SUFFIXES, "jsonl"),
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".json": "dataset_file",
}


@dataclass(frozen=True, slots=True)
class Source:
    """One input that exists: how to read it, and what the manifest says of it.

    `read_once`: a named pipe, which has neither size nor second reading.
    """

    kind: Kind
    record: SourceRecord
    read_once: bool = False

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def compressed(self) -> bool:
        return self.path.endswith(COMPRESSION_SUFFIXES)

    @property
    def is_unpacked(self) -> bool:
        """Whether `bigtrain.data.sources.decompression` writes it out before it is read."""
        return self.compressed and self.kind in ("parquet", "arrow")

    @property
    def is_hashed_by_documents(self) -> bool:
        """Whether its checksum is of documents; of other sources it is of bytes of the file."""
        if self.is_unpacked:
            return False
        return self.kind in ("parquet", "arrow", "dataset_file", "saved_dataset", "hub_dataset")


@dataclass(frozen=True)
class Selection:
    """Which inputs to take: `suffixes` and `exclude` choose among the files of folders."""

    inputs: Sequence[str]
    suffixes: Sequence[str] = DEFAULT_SUFFIXES
    exclude: Sequence[str] = ()
    dataset_config: str | None = None
    dataset_split: str = "train"


def find_sources(selection: Selection) -> list[Source]:
    """The files and datasets that `selection` means, in its order, each once.

    An input is a file, a folder (its files with one of the suffixes, sorted by path), a glob, a
    directory written by ``Dataset.save_to_disk``, or the name of a dataset on the hub. Raises
    DataError for any other, for one that matches nothing, and for one that is named twice.
    """
    inputs = selection.inputs
    named = [os.path.normpath(name) for name in inputs]
    for second, name in enumerate(named):
        first = named.index(name)
        if first < second:
            raise DataError(
                f"--input {inputs[second]} is named twice, as input {first + 1} and {second + 1}, "
                "and would be read once -> name it once; to train on it more often make a dataset "
                "of its own of it, and give that its weight in data.sources"
            )
    found: dict[str, Source] = {}
    again: list[str] = []
    for name in inputs:
        for source in _find(name, selection):
            if source.path in found:
                again.append(source.path)
            found.setdefault(source.path, source)
    if again:
        logger.warning(
            "%d files are meant by several inputs and read once: %s", len(again), again[0]
        )
    if not found:
        raise DataError("no input is left: --exclude matches every file")
    return list(found.values())


def _find(name: str, selection: Selection) -> list[Source]:
    path = Path(name)
    if path.is_dir():
        return _find_in_folder(path, selection)
    if path.exists():
        return [] if _excluded(path.name, selection.exclude) else [_file_source(path)]
    if glob.has_magic(name):
        return _find_by_glob(name, selection)
    known = (*DEFAULT_SUFFIXES, *KINDS, *COMPRESSION_SUFFIXES)
    if name.endswith(known) or not HUB_NAME.fullmatch(name):
        raise DataError(f"--input {name}: no such file, folder or glob")
    return [_hub_source(name)]


def _find_by_glob(pattern: str, selection: Selection) -> list[Source]:
    """Files that match; where only folders do, what is in them."""
    matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    if not matches:
        raise DataError(f"--input {pattern}: no file matches")
    files = [match for match in matches if match.is_file()]
    if not files:
        return [source for match in matches for source in _find(str(match), selection)]
    base = Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    return [
        _file_source(file)
        for file in files
        if not _excluded(str(file.relative_to(base)), selection.exclude)
    ]


def _find_in_folder(folder: Path, selection: Selection) -> list[Source]:
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return [_saved_dataset(folder, selection.dataset_split)]
    suffixes = tuple(selection.suffixes)
    seen: Counter[str] = Counter()
    files: list[str] = []
    for root, directories, names in os.walk(folder):
        # Strings from here on: there may be a million files.
        below = "" if Path(root) == folder else os.path.relpath(root, folder)
        directories[:] = [
            d for d in directories if not _excluded(os.path.join(below, d), selection.exclude)
        ]
        prefix = "" if root == "." else str(Path(root))
        for name in names:
            if selection.exclude and _excluded(os.path.join(below, name), selection.exclude):
                continue
            if name.endswith(suffixes) or without_compression(name).endswith(suffixes):
                files.append(os.path.join(prefix, name))
            seen[os.path.splitext(name)[1] or "no suffix"] += 1
    if not files:
        common = ", ".join(f"{suffix} ({count})" for suffix, count in seen.most_common(5))
        raise DataError(
            f"--input {folder}: no file there ends with {', '.join(suffixes)}; found: "
            f"{common or 'none at all'} -> name the suffix to read as text, for example "
            "--suffix .py"
        )
    return [_file_source(file) for file in sorted(files, key=lambda file: file.split(os.sep))]


def _excluded(relative: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path below the input, or one of its parts."""
    parts = Path(relative).parts
    return any(fnmatch(relative, p) or any(fnmatch(part, p) for part in parts) for p in patterns)


def _file_source(path: str | Path) -> Source:
    name = str(path)
    try:
        name.encode("utf-8")
        status = os.stat(path)
    except UnicodeEncodeError:
        raise DataError(f"--input {name!r}: the name is not UTF-8 -> rename it") from None
    except OSError as error:
        raise DataError(f"--input {path}: {error.strerror}") from error
    kind = KINDS.get(os.path.splitext(without_compression(name))[1], "text")
    record = SourceRecord(
        path=name,
        bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
    )
    return Source(kind, record, read_once=not stat.S_ISREG(status.st_mode))


def _saved_dataset(folder: Path, split: str) -> Source:
    """Of a `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, without importing `datasets`."""
    directory = folder
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise DataError(
                f"--input {folder} has no split {split} -> --dataset-split: "
                f"{', '.join(map(str, splits))}"
            )
        directory = folder / split
    files = [file.stat() for file in sorted(directory.glob("*.arrow"))]
    record = SourceRecord(
        path=str(folder),
        bytes=sum(file.st_size for file in files),
        modified_ns=max((file.st_mtime_ns for file in files), default=0),
        changed_ns=max((file.st_ctime_ns for file in files), default=0),
        revision=_read_json(directory / "state.json").get("_fingerprint"),
    )
    return Source("saved_dataset", record)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"--input {path} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"--input {path} cannot be read: not a JSON object")
    return tree


def _hub_source(name: str) -> Source:
    from huggingface_hub import HfApi

    try:
        revision = HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S).sha
    except Exception as error:  # the client's transport errors differ between its versions
        raise DataError(
            f"--input {name}: no such file, folder or glob, and no dataset of this name can be had "
            f"from the Hugging Face hub ({first_line(error)})"
        ) from error
    return Source("hub_dataset", SourceRecord(path=name, revision=revision))


def without_compression(name: str) -> str:
    """The name of a file without the end that says how it is compressed."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in COMPRESSION_SUFFIXES else name
