"""Cache of results that take seconds to compute and never change, in the user's cache directory.

Its location is ``$BIGTRAIN_CACHE``, else ``$XDG_CACHE_HOME/bigtrain``, else ``~/.cache/bigtrain``;
it may be removed at any time. The key covers everything a result depends on (files by content,
libraries by version, this package by its source), so an entry is never stale. A cache that cannot
be read or written is not an error: the result is computed again.

Derived files that many processes need: one process makes the file, other processes wait for it.

Thousands of ranks start at the same moment and need one file. It is created once in a directory
that they share, or once per host if each host has a directory. Waiting is never required: a process
that sees no live creator creates the file; if no directory is writable, each creates its own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from bigtrain.system.files import whole_file

if TYPE_CHECKING:
    from bigtrain.system.leases import Leases


_SETTLED_NANOSECONDS = 10 * 10**9
"""Age of a file after which any change gives it another time, also on file systems that round times
to seconds, and with hosts whose clocks differ a little."""


def key_of(parts: Sequence[str | bytes]) -> str:
    """Return the key of an entry: SHA-256 of `parts`, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def cache_get(folder: str, key: str) -> dict[str, Any] | None:
    """Return the result that `cache_put` stored for `key`; None if there is none."""
    try:
        return _read(_path(folder, key))
    except RuntimeError:
        return None


def cache_has(folder: str) -> bool:
    """Return whether anything was stored in `folder`."""
    try:
        return (cache_directory() / folder).is_dir()
    except (OSError, RuntimeError):
        return False


def cache_put(folder: str, key: str, result: dict[str, Any]) -> None:
    """Store `result` for `key`, atomically."""
    try:
        path = _path(folder, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, path.with_name(uuid.uuid4().hex), durable=False) as file:
            file.write(json.dumps(result).encode())
    except (OSError, ValueError, RuntimeError):
        return  # no home, no space, no permission: recomputed next time


def cached(folder: str, key: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the cached result for `key`; if several processes need it at once, one calls
    `find`."""
    computed: dict[str, Any] = {}

    def make(file: IO[bytes]) -> None:
        computed.update(find())
        file.write(json.dumps(computed).encode())

    with suppress(RuntimeError):  # no home directory
        result = made_once([_path(folder, key)], _read, make)
        if result is not None:
            return result
    return computed or find()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def package_fingerprints(*libraries: str) -> str:
    """Return checksums of the RECORD files of `libraries`, or versions if there is no RECORD.

    Raises LookupError for an editable install, which may change at any time.
    """
    return " ".join(_fingerprint(library) for library in libraries)


def source_of(*files: str) -> bytes:
    """Return a digest of modules' source files, part of the keys of results that they compute."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.digest()


@functools.cache
def package_source() -> bytes:
    """Return a digest of all source files of bigtrain, for keys of results that depend on much
    source. Computed once a process, which runs the source that it started with. Kept in the cache
    for as long as no file is added, removed or written to, since reading 600 files takes a tenth
    of `bigtrain check`."""
    paths = sorted(_source_files(str(Path(__file__).parents[1])))
    # The time of the last change of a file's content or attributes (ctime) cannot be set back, as
    # the time of its last modification (mtime) can, so that an entry is never stale.
    states = [os.stat(path) for path in paths]
    fields = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states]
    key = key_of([json.dumps([*zip(paths, fields, strict=True)])])
    stored = (cache_get("source_digests", key) or {}).get("sha256")
    if isinstance(stored, str) and re.fullmatch("[0-9a-f]{64}", stored):
        return bytes.fromhex(stored)
    digest = source_of(*paths)
    # A file that is written to while it is read, or in the same tick of the file system's clock,
    # could have other content under the same times.
    newest = max(state.st_ctime_ns for state in states)
    if time.time_ns() - newest > _SETTLED_NANOSECONDS:
        cache_put("source_digests", key, {"sha256": digest.hex()})
    return digest


def _source_files(directory: str) -> Iterator[str]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _source_files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path


def processor() -> str:
    """Return the CPU features that select code paths in libraries. They are part of keys, since
    machines may share a home directory."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()} {platform.node()}"


def _fingerprint(library: str) -> str:
    """Return a text that changes with the installed files of `library`. Raises LookupError."""
    try:
        installed = metadata.distribution(library)
    except metadata.PackageNotFoundError:
        return f"{library} absent"
    if '"editable": true' in (installed.read_text("direct_url.json") or ""):
        raise LookupError(library)
    # Two commits of a repository may be installed as one version, with different checksums of the
    # files. RECORD names the version, too; METADATA takes longer to read, so it is read only where
    # there is no RECORD.
    record = installed.read_text("RECORD")
    if not record:
        return f"{library} {installed.version}"
    return f"{library} {hashlib.sha256(record.encode()).hexdigest()}"


def cache_directory() -> Path:
    """Return the user's cache directory, which may not exist. Raise RuntimeError if there is no
    home directory, as in some containers."""
    cache_root, base = os.environ.get("BIGTRAIN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if cache_root:
        return Path(cache_root)
    # The XDG specification requires ignoring a relative path.
    root = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return root / "bigtrain"


def cache_locations(directory: Path, folder: str, name: str) -> list[Path]:
    """Return the locations for a file derived from `directory`: inside it, shared by all readers,
    or else in the user's cache."""
    paths = [directory / folder / name]
    with suppress(RuntimeError):
        paths.append(cache_directory() / folder / name)
    return paths


def _path(folder: str, key: str) -> Path:
    return cache_directory() / folder / f"{key}.json"


_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 1.0
# Checking the creator's lease takes several file-system calls, checking for the file only one.
_LOOK_FOR_MAKER_SECONDS = 5.0

Content = TypeVar("Content")


def made_once(
    paths: Sequence[Path], read: Callable[[Path], Content | None], make: Callable[[IO[bytes]], None]
) -> Content | None:
    """Return `read` of the first of `paths` that has the file; create it if none has.

    `read` returns None if there is no file, or not the expected one. An exception of `make`
    propagates to the caller, and the next process makes another attempt. None if no location
    is writable.
    """
    for path in paths:
        content = read(path)
        if content is not None:
            return content
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            token = f"{os.getpid():x}{os.urandom(6).hex()}"
            from bigtrain.system.leases import Leases

            leases = Leases(path.parent, token, lambda _name, _token: None)
            return _make_or_wait(path, leases, read, make)
        except OSError:
            continue
    return None


def _make_or_wait(
    path: Path,
    leases: Leases,
    read: Callable[[Path], Content | None],
    make: Callable[[IO[bytes]], None],
) -> Content | None:
    """Return `read(path)`; create the file, or wait for the process that does. Raise OSError if
    `path` is not writable."""
    while True:
        with leases.take(path.name) as is_owner:
            content = read(path)
            if content is None and is_owner:
                draft = path.with_name(f".{path.name}.{leases.token}")
                with whole_file(path, draft, durable=False) as file:
                    os.fchmod(file.fileno(), 0o644)
                    make(file)
                return read(path)
        # Another process makes the file: wait a while, then check again that it is alive.
        pause, deadline = _SHORTEST_PAUSE_SECONDS, time.monotonic() + _LOOK_FOR_MAKER_SECONDS
        while content is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            content = read(path)
        if content is not None:
            return content
