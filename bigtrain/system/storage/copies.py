"""Copies of directories from and to an address: resumable and atomic.

A file that is being fetched is ``NAME.VERSION.partial`` until it is complete; the next process
continues at its end. A copy to an address first writes ``copying.json``
with the checksum of the last file: only files of that copy count as sent.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path

from bigtrain.errors import without_secrets
from bigtrain.system.storage.remote_file import resumed, store_of
from bigtrain.system.storage.stores import (
    WEIGHT_SUFFIXES,
    NotFoundError,
    RemoteStat,
    StorageError,
    joined,
    with_retries,
)
from bigtrain.system.user_cache import cache_directory

MARK = "copying.json"
_FETCHED = ".fetched.json"

NameFilter = Callable[[str], bool]


def list_tree(address: str, selects: NameFilter = lambda name: True) -> dict[str, RemoteStat]:
    """Return the files below `address` by their paths, with slashes. Raise NotFoundError
    if there are none."""
    store = store_of(address)
    entries = with_retries(address, "cannot be listed", lambda: store.find(address))
    begin = len(address.rstrip("/")) + 1  # of a path relative to `address`
    files = {
        name[begin:]: stat
        for name, stat in entries
        if not f"/{name}".endswith(f"/{MARK}") and selects(name[begin:])
    }
    if not files:
        raise NotFoundError(f"{without_secrets(address)}: no file there")
    return files


def fetch_tree(
    address: str,
    directory: Path,
    selects: NameFilter = lambda name: True,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Copy the files below `address` into `directory`; return the number of bytes received.

    Files that an earlier call fetched, and that have not changed there, are kept. Raises
    StorageError, and OSError if `directory` is not writable.
    """
    files = list_tree(address, selects)
    directory.mkdir(parents=True, exist_ok=True)
    # Identities of the files that earlier calls fetched, by name.
    fetched: dict[str, list[object]] = {}
    with suppress(OSError, ValueError):
        entries = json.loads((directory / _FETCHED).read_bytes())
        fetched = entries if isinstance(entries, dict) else {}
    num_bytes = 0
    for name, stat in files.items():
        is_unsafe = any(part in ("", ".", "..") for part in name.split("/"))
        if is_unsafe or "\\" in name or "\0" in name:
            raise StorageError(
                f"{without_secrets(address)} has a file {name!r}, which is not a file name"
            )
        target = directory / name
        is_fetched = fetched.get(name) == _identity(stat) and stat.version is not None
        if is_fetched and target.is_file() and target.stat().st_size == stat.size:
            continue
        say(f"{name}: {stat.size or 0:,} bytes")
        num_bytes += _fetch(joined(address, name), stat, target)
        fetched[name] = _identity(stat)
        # Recorded after each file, so that an interrupted call loses nothing.
        draft = directory / f"{_FETCHED}.{os.getpid()}"
        draft.write_text(json.dumps(fetched))
        draft.replace(directory / _FETCHED)
    return num_bytes


def copy_tree(directory: Path, address: str, last: str | None = None) -> int:
    """Copy the files of `directory` to `address`, with the file `last` at the end; return the
    number of bytes sent.

    With `last`, files that an earlier copy of this directory has in equal size are not sent
    again. Raises StorageError, and FileNotFoundError if a file is removed in the meantime.
    """
    store = store_of(address)
    # Files of this machine's copy; with `last`, files that an unfinished copy has sent.
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    names = [name for name in names if name != _FETCHED and not name.endswith(".partial")]
    copied: dict[str, RemoteStat] = {}
    if last is not None:
        names = [*(name for name in names if name != last), last]
        digest = hashlib.sha256((directory / last).read_bytes()).hexdigest()
        mark, mark_address = json.dumps({"of": digest}).encode(), joined(address, MARK)
        with suppress(NotFoundError):
            stat = with_retries(mark_address, "cannot be read", lambda: store.stat(mark_address))
            if b"".join(resumed(store, mark_address, stat, 0, stat.size)) == mark:
                copied = list_tree(address)
        if last in copied:
            return 0
        with_retries(mark_address, "cannot be written", lambda: store.put(mark_address, mark))
    num_bytes = 0
    for name in names:
        file, target = directory / name, joined(address, name)
        size = file.stat().st_size
        if name in copied and copied[name].size == size:
            continue
        with_retries(target, "cannot be written", partial(store.put, target, file))
        num_bytes += size
    return num_bytes


def local_copy(address: str, *, weights: bool = True) -> Path:
    """Return a directory of this host with the files at `address`, in the user's cache.

    One process of a host fetches, other processes wait; a process fetches once, and again if the
    copy is gone. `weights`: also fetch model weights. Raises StorageError; every rank may call it,
    and it is not collective.
    """
    try:
        # The copy is named after the readable end of the address, and a checksum of the address.
        public_address = without_secrets(address).rstrip("/")
        end = public_address.rpartition("/")[2]
        end = "".join(c if c.isalnum() or c in "-_." else "-" for c in end)
        checksum = hashlib.sha256(public_address.encode()).hexdigest()
        directory = cache_directory() / "fetched" / f"{end[:40]}-{checksum[:16]}"
    except RuntimeError as error:
        raise StorageError(f"{without_secrets(address)}: {error} -> set BIGTRAIN_CACHE") from None
    if not directory.is_dir():
        fetched_copy.cache_clear()
    return fetched_copy(address, directory, weights)


@lru_cache(maxsize=64)
def fetched_copy(address: str, directory: Path, weights: bool) -> Path:
    """Copy the files at `address` to `directory`, and return `directory`. Raises StorageError."""
    try:
        with _exclusive(directory):
            fetch_tree(
                address.rstrip("/"), directory, lambda n: weights or not n.endswith(WEIGHT_SUFFIXES)
            )
    except OSError as error:
        raise StorageError(
            f"{without_secrets(address)} cannot be copied to {directory}: {error} -> set "
            "BIGTRAIN_CACHE"
        ) from None
    return directory


def _fetch(address: str, stat: RemoteStat, target: Path) -> int:
    """Copy a file to `target`, from where an earlier call stopped; return the number of bytes
    received."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(_identity(stat)).encode()).hexdigest()[:12]
    draft = target.with_name(f"{target.name}.{digest}.partial")
    with draft.open("ab") as file:
        begin = file.tell()
        if stat.version is None:  # the existing part may belong to another version
            begin = 0
            file.truncate(0)
        for chunk in resumed(store_of(address), address, stat, begin, stat.size):
            file.write(chunk)
        end = file.tell()
        file.flush()
        os.fsync(file.fileno())
    if stat.size is not None and end != stat.size:
        raise StorageError(f"{without_secrets(address)}: received {end:,} of {stat.size:,} bytes")
    draft.replace(target)
    return end - begin


def _identity(stat: RemoteStat) -> list[object]:
    """Return JSON values that change with the file."""
    return [stat.size, stat.version, stat.modified_ns]


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Let one process at a time run the block for `directory`."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def checkpoint_steps(files: Sequence[str]) -> list[int]:
    """Return the steps of the complete checkpoints among the files of a copied run, newest
    first."""
    steps = (
        name.split("/")[1].removeprefix("step-")
        for name in files
        if name.startswith("checkpoints/step-") and name.endswith("/manifest.json")
    )
    return sorted((int(step) for step in steps if step.isdigit()), reverse=True)
