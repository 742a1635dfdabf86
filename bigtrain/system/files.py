"""Atomic writes: output files and directories exist either complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

from bigtrain.errors import DataError, LaunchError, OutputError, one_line

_NOT_A_FULL_DISK = (
    errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ELOOP,
)  # fmt: skip


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError of the block into an OutputError that names `path` and `remedy`."""
    try:
        yield
    except OSError as error:
        raise OutputError(cannot_be_written(path, error, remedy)) from error


def cannot_be_written(path: Path, error: Exception, remedy: str) -> str:
    """Return the text of an OutputError. "make room, or " at the beginning of `remedy` is omitted
    if `error` is not that of a full disk."""
    if getattr(error, "errno", None) in _NOT_A_FULL_DISK:
        remedy = remedy.removeprefix("make room, or ")
    return f"{path}: cannot be written: {one_line(error, None)} -> {remedy}"


def has_checkpoints(run_directory: str | Path) -> bool:
    """Return whether a run in `run_directory` has saved, so that its next launch resumes."""
    return any(Path(run_directory, "checkpoints").glob("step-*"))


def why_not_creatable(directory: Path) -> str | None:
    """Return the reason why no file can be written to `directory` (may not exist yet), or None.

    If it does not exist, its nearest existing parent is tested by writing: some file systems
    (``/proc``) reject what the permissions allow. Leaves nothing behind.
    """
    ancestor = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not ancestor.is_dir():
        return f"{ancestor} is not a directory"
    if not os.access(ancestor, os.W_OK | os.X_OK):
        return f"this user cannot write to {ancestor}"
    if ancestor != directory:
        try:
            os.rmdir(tempfile.mkdtemp(dir=ancestor, prefix=".bigtrain-"))
        except OSError as error:
            return f"{ancestor} takes no files: {error.strerror or error}"
    return None


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill; it is renamed to `path` when the block ends without an exception.

    Until then it is ``.NAME.partial`` next to `path`. An exception removes it; the leftovers of a
    killed process are removed by the next one. Files and directories are synced before the rename,
    so after a crash of the machine `path` is either absent or complete.

    Raises DataError if `path` exists and is not an empty directory, if another process is
    writing it, or if it cannot be written. Call it from one process.
    """
    require_free(path)
    partial = path.parent / f".{path.name}.partial"
    created: list[Path] = []
    lock: int | None = None
    try:
        try:
            created = make_parents(path.parent)
            lock = _lock_empty(partial, path)
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error
        yield partial
        sync_tree(partial)
        require_free(path)
        # Renaming over an empty directory is atomic; over anything else it fails.
        partial.rename(path)
        sync_to_disk(path.parent)
        created = []
    finally:
        if lock is not None:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
        for parent in reversed(created):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def require_free(path: Path) -> None:
    """Raise DataError if writing `path` would overwrite something.

    Checks once: another process may create `path` at any moment.
    """
    try:
        is_empty = not any(path.iterdir())
    except FileNotFoundError:
        if not path.is_symlink():  # a broken link would be overwritten
            return
    except NotADirectoryError:
        if not path.exists():  # a parent is a file: writing will fail
            return
    else:
        if is_empty:
            return
        raise DataError(
            f"{path} exists and is not empty; nothing was written -> choose another --output, "
            "or remove it first"
        )
    raise DataError(f"{path} exists and is not a directory -> choose another --output")


def make_parents(directory: Path) -> list[Path]:
    """Create `directory` and its missing parents; return the created directories, innermost
    last."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return list(reversed(missing))


def _lock_empty(partial: Path, path: Path) -> int:
    """Create, lock and empty `partial`; return the file descriptor of the lock. The system releases
    the lock with the process, however the process ends."""
    while True:
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between `open` and `flock` the owner may have renamed `partial` to `path`, or removed
            # it: then create another one.
            if partial.exists() and os.path.samestat(os.fstat(lock), partial.stat()):
                for entry in partial.iterdir():
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
                return lock
        except BlockingIOError:
            os.close(lock)
            raise DataError(
                f"{path} is being written by another process -> wait for it, or choose another "
                "--output"
            ) from None
        os.close(lock)
        require_free(path)


def sync_tree(directory: Path) -> None:
    """fsync all files and folders of `directory`."""
    for root, _, files in os.walk(directory):
        for name in files:
            sync_to_disk(Path(root, name))
        sync_to_disk(Path(root))


def sync_to_disk(path: Path) -> None:
    """fsync a file or directory (for a directory, that makes its entries durable)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_whole(path: Path, content: bytes, draft: Path, durable: bool = True) -> bool:
    """Create `path` with `content` atomically; return False if it exists already.

    If several processes try, only one succeeds: `path` is a hard link to `draft` (a name that only
    this process uses, on the same file system), so it never exists without its content. If the file
    system has no hard links, it is created exclusively (O_EXCL). `durable`: as in `whole_file`.
    """
    try:
        draft.write_bytes(content)
        if durable:
            sync_to_disk(draft)
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
    finally:
        draft.unlink(missing_ok=True)
    if durable:
        sync_to_disk(path.parent)
    return True


def write_whole(
    path: Path, content: bytes | bytearray | memoryview, draft: Path | None = None
) -> None:
    """Write `content` to `path` with `whole_file`."""
    with whole_file(path, draft or path.with_name(f"{path.name}.partial")) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, draft: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """Yield a file to write; it is renamed to `path` when the block ends without an exception.

    `draft`: temporary name, on the same file system; processes that may write `path` at once need
    different names. `durable`: fsync, so that the file survives a crash of the machine.
    """
    try:
        with draft.open("w+b") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_to_disk(path.parent)


def require_regular(path: Path) -> os.stat_result:
    """Return the status of a regular file. Raise OSError for anything else: reading a pipe would
    block, and a link to itself cannot be resolved."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status


def file_checksum(path: Path) -> str:
    """Return the XXH3-64 of a file as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_new(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` as UTF-8 to `path` with permissions `mode` (minus the umask).

    Raises LaunchError if the file exists with different content (it may have been edited), and
    if it cannot be written; then no partial file remains.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise LaunchError(f"{path} exists and differs: delete it, or choose another --output")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        remedy = "choose another --output, or fix the permission or disk problem"
        raise LaunchError(f"cannot write {path}: {error.strerror} -> {remedy}") from error


RUN_ID = "run_id"
"""File of every run directory, written before all others but the folder ``generations``."""
RUN_TEXTS = ("log.txt", "metrics.jsonl", "starts.jsonl")
RUN_FOLDERS = (
    *("base", "checkpoints", "generations", "hangs", "hf", "model_config", "outer_server"),
    *("profile", "reference", "tokenizer"),
)


def run_files(names: Iterable[str], is_run: Callable[[str], bool]) -> list[str]:
    """Return the `names`, paths of files with slashes, that a run has written: its texts, and files
    in its folders. is_run: whether a folder is a run directory, by its path relative to the folder
    of `names` (empty for that folder)."""
    written = []
    for name in names:
        *folders, file = name.split("/")
        # The lengths of paths that may be a run directory: above a folder or a text of a run.
        path_lengths = [n for n, folder in enumerate(folders) if folder in RUN_FOLDERS]
        if file in RUN_TEXTS:
            path_lengths.append(len(folders))
        if any(is_run("/".join(folders[:length])) for length in path_lengths):
            written.append(name)
    return written
