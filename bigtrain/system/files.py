"""Atomic writes: output files and directories exist either complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import xxhash

from bigtrain.errors import DataError, LaunchError, OutputError

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
    """The text of an OutputError. `remedy`: begins with "make room, or ", which is left away
    where the disk is not what is wrong."""
    if getattr(error, "errno", None) in _NOT_A_FULL_DISK:
        remedy = remedy.removeprefix("make room, or ")
    return f"{path}: cannot be written: {' '.join(str(error).split())} -> {remedy}"


def why_not_creatable(directory: Path) -> str | None:
    """Why no file can be written to `directory`, which may not exist yet; None if one can.

    Where it does not exist, the directory that it would be created in is tried: some file systems
    (``/proc``) refuse what the permissions allow. Leaves nothing behind.
    """
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is not a directory"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"this user cannot write to {there}"
    if there != directory:
        try:
            os.rmdir(tempfile.mkdtemp(dir=there, prefix=".bigtrain-"))
        except OSError as error:
            return f"{there} takes no files: {error.strerror or error}"
    return None


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which is renamed to `path` when the block ends without an exception.

    Until then it is ``.NAME.partial`` beside `path`. An exception removes it; what a killed process
    left of it is removed by the next one. Files and directories are synced before the rename, so
    after a crash of the machine `path` is either absent or complete.

    Raises DataError where `path` exists and is not an empty directory, where another process is
    writing it, or where it cannot be written. Call it from one process.
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
    """Raises DataError where writing `path` would overwrite something.

    Looks once: another process may make `path` at any moment, also between two looks.
    """
    try:
        is_empty = not any(path.iterdir())
    except FileNotFoundError:
        if not path.is_symlink():
            return
    except NotADirectoryError:
        if not path.exists():
            return
    else:
        if is_empty:
            return
        raise DataError(
            f"{path} exists and is not empty; nothing was written -> name another --output, "
            "or remove it first"
        )
    raise DataError(f"{path} exists and is not a directory -> name another --output")


def make_parents(directory: Path) -> list[Path]:
    """Create `directory` and its missing parents; returns those created, innermost last."""
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return list(reversed(missing))


def _lock_empty(partial: Path, path: Path) -> int:
    """Create, lock and empty `partial`. The lock is released with the process, however it ends."""
    while True:
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock its owner may have renamed it to `path`, or removed it.
            if partial.exists() and os.path.samestat(os.fstat(lock), partial.stat()):
                _clear(partial)
                return lock
        except BlockingIOError:
            os.close(lock)
            raise DataError(
                f"{path} is being written by another process -> wait for it, or name another "
                "--output"
            ) from None
        os.close(lock)
        require_free(path)


def _clear(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def existing_above(path: Path) -> Path:
    """The nearest existing parent folder of `path`."""
    return next(parent for parent in path.absolute().parents if parent.is_dir())


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
    """Create `path` with `content` atomically; returns False where it exists already.

    Of several processes that try, only one succeeds: `path` is a hard link to `draft` (a name that
    only this process uses, on the same file system), so it never exists without its content. Where
    there are no hard links, it is created exclusively (O_EXCL). `durable`: as in `whole_file`.
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


def write_whole(path: Path, content: bytes, draft: Path | None = None) -> None:
    """Write `content` to `path` with `whole_file`."""
    with whole_file(path, draft or path.with_name(f"{path.name}.partial")) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, draft: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to write, which is renamed to `path` when the block ends without an exception.

    `draft`: its temporary name, on the same file system; each of several processes that may write
    `path` at once needs its own. `durable`: fsync, so that it survives a crash of the machine.
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
    """The status of a file that is read. Raises OSError for what is no regular file: a pipe would
    be waited for, and a link to itself leads nowhere."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return status


def file_checksum(path: Path) -> str:
    """XXH3-64 of a file as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_new(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` as UTF-8 to `path` with permissions `mode` (minus the umask).

    Raises LaunchError where the file exists with another text, which somebody may have edited, and
    where it cannot be written; then nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise LaunchError(f"{path} exists and differs: delete it, or name another --output")
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
        remedy = "name another --output, or free what hinders it"
        raise LaunchError(f"cannot write {path}: {error.strerror} -> {remedy}") from error
