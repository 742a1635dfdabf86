"""Directory of a run's checkpoints in shared memory of this host. Imports no torch.

::

    /dev/shm/bigtrain-1000/              of this user only (mode 700)
        91c0...-5d2f.../                 of one run: hash of its directory's path, and its id
            lock                         held by the launch that uses it, until its process ends
            checkpoints/step-00000012/   as on disk, with the tensor files that this host has

Checkpoints have the format of checkpoints on disk, but a host has only the tensor files of the
host's ranks (and of the partner's ranks). The manifest is equal on all hosts and lists every file.
The directory outlives processes, not the host. A run removes it at its end; directories of earlier
runs at this path are removed by the next start, directories of other runs after `MOST_HOURS`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.context import RunContext
from bigtrain.run.health import fencing
from bigtrain.settings.sections.running import DEFAULT_MEMORY_DIRECTORY
from bigtrain.system.files import write_whole

MOST_HOURS = 24
"""Age from which directories of other runs are removed, if no process uses them."""

_LOCK = "lock"
_RUN_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_LOCK_SECONDS = 10.0  # processes of an earlier launch may be ending


@dataclass(frozen=True)
class MemoryCheckpoint:
    """Checkpoint that all remaining hosts together have completely. digest: of the manifest.
    source: the first rank that keeps a directory with it."""

    step: int
    digest: str
    source: int


@dataclass(frozen=True)
class StoredInMemory:
    """Checkpoint in memory of a host. run, attempt: see `SaveIdentity`. digest: of the manifest,
    equal on all hosts that have the checkpoint. writers: number of ranks that wrote the checkpoint,
    a tensor file each. files: names of the tensor files that are on this host with the listed
    size."""

    step: int
    run: str
    attempt: str
    digest: str
    writers: int
    files: frozenset[str]


@dataclass
class MemoryDirectory:
    """Directory of one run on this host, opened by one process of the host. path: laid out like a
    run directory, so that functions of `checkpoints` apply."""

    path: Path
    _lock: int | None = field(default=None, repr=False)

    @classmethod
    def of(cls, mount: str, run_directory: Path, run_id: str) -> MemoryDirectory:
        """Return the directory of the run `run_id`, which need not exist, in the file system
        at `mount`."""
        return cls(_root(mount) / f"{_path_hash(run_directory)}-{run_id}")

    def open(self) -> None:
        """Create the directory if it is missing, and hold it until `close` or the end of this
        process. Raises CheckpointError if another process holds it, another user owns it, or it
        cannot be created."""
        if self._lock is not None:
            return
        try:
            _make_private(self.path.parent)
            _make_private(self.path)
            (self.path / "checkpoints").mkdir(exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be used: {error}") from error
        end = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(self._lock):
            if time.monotonic() > end:
                raise CheckpointError(f"{self.path} is in use by another process of this run")
            time.sleep(0.05)

    def close(self) -> None:
        """Let another process open the directory. May be called again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Remove the directory and its checkpoints; never raises."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()  # unless it holds other runs
        self.close()

    def stored(self) -> list[StoredInMemory]:
        """Return the checkpoints whose small files are complete, oldest first. Tensor files are
        verified when they are read."""
        complete = []
        for step in checkpoints.list_steps(self.path):
            directory = checkpoints.checkpoint_path(self.path, step)
            with suppress(CorruptCheckpointError, OSError):
                complete.append(stored_at(directory))
        return complete

    def keep_only(self, step: int | None) -> None:
        """Remove everything but the checkpoint of `step`. Raises OSError."""
        for path in (self.path / "checkpoints").iterdir():
            if step is None or path != checkpoints.checkpoint_path(self.path, step):
                shutil.rmtree(path)

    def num_bytes(self) -> int:
        """Return the bytes of all files below the directory."""
        return sum(path.lstat().st_size for path in self.path.rglob("*") if path.is_file())


def stored_at(directory: Path) -> StoredInMemory:
    """Return the checkpoint at `directory`. Raises CorruptCheckpointError, OSError."""
    manifest = checkpoints.read_manifest(directory)
    checkpoints.verify_small_files(directory, manifest)
    files, tensors = set(), directory / checkpoints.TENSORS
    # Scan the directory, which has the files of a few ranks; the manifest lists all ranks' files.
    with suppress(FileNotFoundError), os.scandir(tensors) as entries:
        for entry in entries:
            listed_bytes, _ = manifest.files.get(f"{checkpoints.TENSORS}/{entry.name}", (None, ""))
            if entry.is_file(follow_symlinks=False) and entry.stat().st_size == listed_bytes:
                files.add(entry.name)
    digest = checkpoints.manifest_digest(directory)
    identity, num_writers = manifest.identity, len(manifest.headers)
    return StoredInMemory(
        identity.step, identity.run, identity.attempt, digest, num_writers, frozenset(files)
    )


def write_documents(partial: Path, documents: Mapping[str, bytes]) -> Path:
    """Write the small files of a checkpoint, the manifest last, and commit the checkpoint by
    renaming its directory; return its path. The tensor files must exist. Raises OSError."""
    manifest_last = sorted(documents, key=lambda name: name == checkpoints.MANIFEST)
    for name in manifest_last:
        write_whole(partial / name, documents[name])
    return commit_directory(partial)


def commit_directory(partial: Path) -> Path:
    """Commit a checkpoint that is complete by renaming its directory; return its path. Raises
    OSError."""
    final = partial.with_name(partial.name.split(".", 1)[0])
    if os.path.lexists(final):
        shutil.rmtree(final)
    partial.rename(final)
    return final


def keeper_of(hosts: Sequence[str], rank: int) -> int:
    """Return the keeper of the memory directory on the host of `rank`: the host's first rank.
    hosts: by rank."""
    return hosts.index(hosts[rank])


def remove_left_over(context: RunContext, keep: Path | None) -> None:
    """Remove directories in memory that earlier runs left on this rank's host, except `keep`. Not
    collective."""
    if keeper_of(context.hosts, context.world.rank) != context.world.rank:
        return
    section = context.config.checkpoint.memory
    mount = DEFAULT_MEMORY_DIRECTORY if section is None else section.directory
    num_removed = remove_stale(mount, keep, context.directory)
    if num_removed:
        context.log.info(
            f"removed {num_removed} left-over directories of checkpoints in memory from {mount}"
        )


def remove_stale(mount: str, keep: Path | None, run_directory: Path) -> int:
    """Remove from the file system at `mount` directories of earlier runs at `run_directory`, except
    `keep`, and directories of this user's other runs that are older than `MOST_HOURS`; no directory
    that a process uses. Returns the number of removed directories; never raises."""
    root, path_hash, num_removed = _root(mount), _path_hash(run_directory), 0
    with suppress(OSError):
        if not _is_private(root):
            return 0
        oldest_kept = time.time() - MOST_HOURS * 3600
        for path in root.iterdir():
            if path == keep or _RUN_NAME.fullmatch(path.name) is None:
                continue
            with suppress(OSError):
                is_same_path = path.name.startswith(f"{path_hash}-")
                folders = [folder for folder in (path, path / "checkpoints") if folder.exists()]
                changed_at = max(folder.lstat().st_mtime for folder in folders)
                if is_same_path or changed_at < oldest_kept:
                    with _opened(path / _LOCK) as lock_file:
                        # A lock that can be acquired is not held by a process.
                        if lock_file is None or _try_lock(lock_file):
                            shutil.rmtree(path)
                            num_removed += 1
        if not any(root.iterdir()):
            root.rmdir()
    return num_removed


def steps_of_attempts(run_directory: Path) -> dict[str, float]:
    """Return, for each attempt (launch), the newest step whose checkpoint still belongs to the run:
    a later launch replaces the steps after the step from which it continued. Infinite without later
    launches."""
    # Generations by attempt, and the step from which a generation continued.
    generations: dict[str, int] = {}
    for path in (run_directory / fencing.DIRECTORY).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            holder = json.loads(path.read_bytes())
            generations[str(holder["attempt"])] = int(holder["generation"])
    starts: list[tuple[int, int]] = []
    with suppress(OSError):
        for line in (run_directory / "starts.jsonl").read_text().splitlines():
            with suppress(ValueError, KeyError, TypeError):
                start = json.loads(line)
                starts.append((int(start["generation"]), int(start["step"])))
    newest_steps: dict[str, float] = {}
    for attempt, attempt_generation in generations.items():
        later_steps = [step for generation, step in starts if generation > attempt_generation]
        newest_steps[attempt] = min(later_steps, default=math.inf)
    return newest_steps


def _root(mount: str) -> Path:
    return Path(mount) / f"bigtrain-{os.getuid()}"


def _path_hash(run_directory: Path) -> str:
    return hashlib.sha256(os.fsencode(run_directory.resolve())).hexdigest()[:16]


def _make_private(path: Path) -> None:
    """Create a directory for this user only. Raises OSError if it is another user's or readable by
    others."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not _is_private(path):
        raise PermissionError(f"{path} is not a directory of this user only")


def _is_private(path: Path) -> bool:
    """Return whether `path` is a directory of this user that no other user can read or write."""
    status = path.lstat()
    is_of_this_user = status.st_uid == os.getuid()
    permissions_of_others = stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and is_of_this_user and not permissions_of_others


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
