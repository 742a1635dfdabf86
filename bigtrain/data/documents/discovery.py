"""Discovery of the files and datasets that an input names, with their sizes and times.

The suffix of a name without compression determines the format (`bigtrain.data.documents.formats`);
any other file is one unmodified document (bytes decoded as UTF-8, nothing stripped or translated).
An input may be an address (`bigtrain.system.storage.stores`), or ``-`` for standard input.
"""

from __future__ import annotations

import difflib
import glob
import json
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from fsspec.utils import glob_translate

from bigtrain.data.documents.compression import COMPRESSION_SUFFIXES, without_compression
from bigtrain.data.documents.dataset_readers import HubDatasetReader, SavedDatasetReader
from bigtrain.data.documents.files import STANDARD_INPUT, Selection, Source
from bigtrain.data.documents.formats import BY_SUFFIX, DEFAULT_SUFFIXES, format_of
from bigtrain.data.documents.links import Links
from bigtrain.data.shards.manifest import SourceRecord
from bigtrain.data.tokenizers.cache import HUB_TIMEOUT_S
from bigtrain.errors import DataError, first_line, without_secrets
from bigtrain.system.files import RUN_ID, run_files
from bigtrain.system.storage.remote_file import store_of
from bigtrain.system.storage.stores import (
    NotFoundError,
    RemoteStat,
    is_address,
    name_of,
    scheme_of,
    with_retries,
)

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SHOWN_SUFFIXES = 5


def find_sources(selection: Selection) -> list[Source]:
    """Return the files and datasets of `selection`, in its order, each once.

    An input is a file, a folder (its files with one of the suffixes, sorted by path), a glob, a
    directory written by ``Dataset.save_to_disk``, the name of a dataset on the Hub, an address of a
    file, of a folder or with a glob, or ``-`` for standard input. Raises DataError for any other
    input, for one without matches, and for one that is named twice.
    """
    # The same input twice would silently be read once.
    inputs = selection.inputs
    names = [name if is_address(name) else os.path.normpath(name) for name in inputs]
    for index, name in enumerate(names):
        first = names.index(name)
        if first < index:
            raise DataError(
                f"--input {without_secrets(inputs[index])} is named twice, as input {first + 1} "
                f"and {index + 1}, but would be read once -> name it once; to train on it more "
                "often, make a separate dataset of it, and set its weight in data.sources"
            )
    # A file that several inputs match is read once.
    sources: dict[str, Source] = {}
    duplicates: list[str] = []
    for name in inputs:
        for source in _find(name, selection):
            if source.path in sources:
                duplicates.append(source.path)
            sources.setdefault(source.path, source)
    if duplicates:
        logger.warning(
            "%d files match several inputs and are read once: %s", len(duplicates), duplicates[0]
        )
    if not sources:
        raise DataError(
            "no input remains: --exclude matches every file, or a run of bigtrain wrote it"
        )
    return list(sources.values())


def _find(name: str, selection: Selection) -> list[Source]:
    """Return the files and datasets that one input names. Raise as `find_sources`."""
    if name == STANDARD_INPUT:
        # Content read from it earlier cannot be read again.
        record = SourceRecord(path=name, modified_ns=time.time_ns())
        read_as = selection.read_as or ".jsonl"
        return [Source(format_of(read_as), record, read_once=True, read_as=read_as)]
    if is_address(name):
        return _find_at_address(name, selection)
    path = Path(name)
    if path.is_dir():
        return _find_in_folder(path, selection)
    if path.exists():
        return [] if _excluded(path.name, selection.exclude) else [_file_source(path, selection)]
    if glob.has_magic(name):
        return _find_by_glob(name, selection)
    if name.endswith((*BY_SUFFIX, *COMPRESSION_SUFFIXES)) or not HUB_NAME.fullmatch(name):
        neighbours = os.listdir(path.parent) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, neighbours, n=1)
        fix = f"did you mean {path.parent / close[0]}?" if close else "a path from this directory"
        raise DataError(f"--input {name}: no such file, folder or glob -> {fix}")

    # Any other name may be a dataset on the Hub.
    from huggingface_hub import HfApi

    try:
        revision = HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S).sha
    except Exception as error:  # the client's transport errors differ between its versions
        raise DataError(
            f"--input {name}: no such file, folder or glob, and no such dataset on the "
            f"Hugging Face Hub ({first_line(error)}) -> a path, or the name of a dataset"
        ) from error
    return [Source(HubDatasetReader, SourceRecord(path=name, revision=revision))]


def _find_by_glob(pattern: str, selection: Selection) -> list[Source]:
    """Return the matching files; if only folders match, the files inside."""
    matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    if not matches:
        raise DataError(f"--input {pattern}: no file matches")
    files = [match for match in matches if not match.is_dir()]
    if not files:
        return [source for match in matches for source in _find(str(match), selection)]
    # The folder before the first pattern; paths below it are matched by --exclude.
    base = Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    below_base = [(str(file.relative_to(base)), str(file)) for file in files]
    selected = [(below, f) for below, f in below_base if not _excluded(below, selection.exclude)]
    links = Links(str(base), selection.follow_links)
    selected = _without_run_files(pattern, selected, _is_run_below(str(base)))
    return [_file_source(path, selection) for path in links.without_duplicates(selected)]


def _is_run_below(base: str) -> Callable[[str], bool]:
    """Return a predicate of the path of a folder below `base`: whether it is a folder of a run."""
    return cache(lambda folder: os.path.isfile(os.path.join(base, folder, RUN_ID)))


def _find_in_folder(folder: Path, selection: Selection) -> list[Source]:
    """Return the saved dataset in a folder, or the selected files below the folder."""
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return [_saved_dataset(folder, selection)]
    links = Links(str(folder), selection.follow_links)
    # Strings, since there may be a million.
    files = links.files(lambda below: _excluded(below, selection.exclude))
    files = _without_run_files(str(folder), files, _is_run_below(str(folder)))
    selected = _select_files(str(folder), files, selection)
    selected.sort(key=lambda file: file[1].split(os.sep))  # folder by folder
    return [_file_source(path, selection) for path in links.without_duplicates(selected)]


File = TypeVar("File")
"""Path of a local file, or source of a remote file."""


def _without_run_files(
    input_name: str, files: Sequence[tuple[str, File]], is_run: Callable[[str], bool]
) -> list[tuple[str, File]]:
    """Return `files`, by their paths below an input that is called `input_name`, without logs,
    metrics, checkpoints and exports of runs of bigtrain. Log what was skipped once."""
    run_paths = run_files((below.replace(os.sep, "/") for below, _ in files), is_run)
    if not run_paths:
        return list(files)
    names = ", ".join(run_paths[:3]) + (f" and {len(run_paths) - 3} more" if run_paths[3:] else "")
    _warn_once(
        f"--input {input_name}: skipped what a run of bigtrain wrote: {names}; to read one of "
        "these files, name it"
    )
    skipped = set(run_paths)
    return [(below, file) for below, file in files if below.replace(os.sep, "/") not in skipped]


def _select_files(
    folder: str, files: Sequence[tuple[str, File]], selection: Selection
) -> list[tuple[str, File]]:
    """Return the selected `files`, by their paths below `folder`. Raise DataError if none."""
    suffixes = tuple(selection.suffixes or DEFAULT_SUFFIXES)
    selected = []
    found_suffixes: Counter[str] = Counter()
    unread_suffixes: Counter[str] = Counter()  # readable if `suffixes` had them
    # The suffix of a compressed file is the suffix without compression, too.
    for below, file in files:
        if _excluded(below, selection.exclude):
            continue
        bare = without_compression(below)
        if below.endswith(suffixes) or bare.endswith(suffixes):
            selected.append((below, file))
        elif (suffix := os.path.splitext(bare)[1]).lower() in BY_SUFFIX:
            unread_suffixes[suffix] += 1
        found_suffixes[os.path.splitext(below)[1] or "no suffix"] += 1

    # Name the suffixes that would select files.
    if not selected:
        counts = found_suffixes.most_common(SHOWN_SUFFIXES)
        common = ", ".join(f"{suffix} ({count})" for suffix, count in counts)
        fix = "name the suffix to read as text, for example --suffix .py"
        if unread_suffixes:
            fix = " ".join(f"--suffix {suffix}" for suffix in sorted(unread_suffixes))
        raise DataError(
            f"--input {folder}: no file there ends with {', '.join(suffixes)}; found: "
            f"{common or 'none at all'} -> {fix}"
        )
    if unread_suffixes and suffixes == DEFAULT_SUFFIXES:
        counts = unread_suffixes.most_common(SHOWN_SUFFIXES)
        skipped = ", ".join(f"{suffix} ({count})" for suffix, count in counts)
        _warn_once(
            f"--input {folder}: without --suffix only {', '.join(suffixes)} are read from a "
            f"folder; skipped: {skipped}"
        )
    return selected


@cache
def _warn_once(text: str) -> None:
    """Warn once: a command searches its inputs several times."""
    logger.warning("%s", text)


def _find_at_address(name: str, selection: Selection) -> list[Source]:
    """Return a file, the files that match ``*``, ``?``, ``[...]`` and ``**`` (any number of
    folders), or the files of a folder, without the files that a run of bigtrain has written."""
    store, display_name = store_of(name), without_secrets(name)
    is_web, has_pattern = scheme_of(name) in ("http", "https"), is_pattern(name)
    # An address names a file; if there is none, a folder, which web servers do not have.
    if not has_pattern and (is_web or not name.endswith("/")):
        try:
            status = with_retries(name, "cannot be read", lambda: store.stat(name))
            return [_remote_source(name, status, selection)]
        except NotFoundError:
            if is_web:
                raise
    # All files of the folder, which a pattern has before its first special character.
    folder = re.split(r"[*?[]", name, maxsplit=1)[0].rpartition("/")[0] if has_pattern else name
    base_length = len(folder.rstrip("/")) + 1
    listing = with_retries(folder, "cannot be listed", lambda: store.find(folder))
    # The file that marks a folder as a run's need not match the pattern itself.
    split_paths = [address[base_length:].rpartition("/") for address, _ in listing]
    runs = {run_folder for run_folder, _, file_name in split_paths if file_name == RUN_ID}
    if has_pattern:
        # `glob_translate` refuses ``**`` as a part of a name: ``**x`` becomes ``**/*x``.
        expanded = re.sub(r"(?<=/)\*\*(?=[^/])", "**/*", name)
        try:
            matcher = re.compile(glob_translate(expanded))
        except ValueError as error:
            raise DataError(f"--input {display_name}: {error}") from None
        listing = [entry for entry in listing if matcher.fullmatch(entry[0])]
    if not listing:
        raise DataError(f"--input {display_name}: no file there")
    files = [(path[base_length:], _remote_source(path, s, selection)) for path, s in listing]
    files = _without_run_files(display_name, files, runs.__contains__)
    # Select the files of a folder by their suffixes.
    if not has_pattern:
        if any(below.endswith(("dataset_info.json", "dataset_dict.json")) for below, _ in files):
            raise DataError(
                f"--input {display_name} is a dataset of Dataset.save_to_disk -> name its "
                "files, ADDRESS/*.arrow, or copy it here"
            )
        files = _select_files(display_name, files, selection)
    return [source for below, source in files if not _excluded(below, selection.exclude)]


def _remote_source(address: str, status: RemoteStat, selection: Selection) -> Source:
    display_address = without_secrets(address)
    record = SourceRecord(
        path=display_address,
        bytes=status.size,
        modified_ns=status.modified_ns,
        revision=status.version,
    )
    name = selection.read_as or name_of(display_address)
    return Source(format_of(name), record, address=address, read_as=selection.read_as)


def _excluded(relative: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the path below the input, or a part of the path."""
    if not patterns:  # saves the parsing of a million paths
        return False
    candidates = (relative, *Path(relative).parts)
    return any(fnmatch(name, pattern) for pattern in patterns for name in candidates)


def _file_source(path: str | Path, selection: Selection) -> Source:
    """Return the source of a local file. Raise DataError if its status cannot be read."""
    name = str(path)
    try:
        name.encode("utf-8")
        status = os.stat(path)
    except UnicodeEncodeError:
        raise DataError(f"--input {name!r}: the name is not UTF-8 -> rename it") from None
    except OSError as error:
        raise DataError(f"--input {path}: {error.strerror}") from error
    reader = format_of(selection.read_as or name)
    record = SourceRecord(
        path=name,
        bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
    )
    is_stream = not stat.S_ISREG(status.st_mode)
    return Source(reader, record, read_once=is_stream, read_as=selection.read_as)


def _saved_dataset(folder: Path, selection: Selection) -> Source:
    """Return the source of a `Dataset.save_to_disk` or `DatasetDict.save_to_disk` folder."""
    directory, split = folder, selection.dataset_split
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        if split not in splits:
            raise DataError(
                f"--input {folder} has no split {split} -> --dataset-split: "
                f"{', '.join(map(str, splits))}"
            )
        directory = folder / split
    entries = [(str(file.relative_to(folder)), str(file)) for file in sorted(directory.iterdir())]
    Links(str(folder), selection.follow_links).without_duplicates(entries)  # refuses foreign files
    stats = [file.stat() for file in sorted(directory.glob("*.arrow"))]
    record = SourceRecord(
        path=str(folder),
        bytes=sum(status.st_size for status in stats),
        modified_ns=max((status.st_mtime_ns for status in stats), default=0),
        changed_ns=max((status.st_ctime_ns for status in stats), default=0),
        revision=_read_json(directory / "state.json").get("_fingerprint"),
    )
    return Source(SavedDatasetReader, record)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"--input {path} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"--input {path} cannot be read: not a JSON object")
    return tree


def is_pattern(address: str) -> bool:
    """Return whether an address has ``*``, ``?`` or ``[...]``, which are literal on web servers."""
    return scheme_of(address) not in ("http", "https") and glob.has_magic(address)
