"""Files of every other scheme that fsspec supports, such as ``hf://``; also `memory` and `file`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from bigtrain.errors import without_secrets
from bigtrain.system.storage.stores import (
    AccessDeniedError,
    NotFoundError,
    RemoteStat,
    StorageError,
    Store,
    TransientError,
    changed,
    joined,
    unreadable,
)

BLOCK_BYTES = 1 << 23
"""Requested at once, since not every file system streams bytes as they arrive."""
VERSIONS = ("ETag", "etag", "e_tag", "blob_id", "md5Hash", "generation", "uid")
TIMES = ("LastModified", "last_modified", "modified", "mtime", "updated")


class FsspecStore(Store):
    """Store that uses fsspec's file system of `scheme`, with the settings of FSSPEC_*
    variables."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme

    def stat(self, address: str) -> RemoteStat:
        files, path = self._open(address)
        with _translated_errors(address):
            files.invalidate_cache()  # earlier listings may be outdated
            info = files.info(path)
            if info.get("type") == "directory":
                raise FileNotFoundError
        return _stat(info)

    def read(
        self, address: str, begin: int, end: int | None, listed: RemoteStat
    ) -> Iterator[bytes | memoryview]:
        if not listed.is_same(self.stat(address)):
            raise changed(address)
        files, path = self._open(address)
        stop = listed.size if end is None else end
        if stop is None:  # its length is known only at its end
            with _translated_errors(address):
                content: bytes = files.cat_file(path)
            yield content[begin:]
            return
        while begin < stop:
            upto = min(stop, begin + BLOCK_BYTES)
            with _translated_errors(address):
                content = files.cat_file(path, start=begin, end=upto)
            if len(content) != upto - begin:
                raise TransientError("the connection ended early")
            yield content
            begin = upto

    def find(self, address: str) -> list[tuple[str, RemoteStat]]:
        files, path = self._open(address)
        with _translated_errors(address):
            files_by_path = files.find(path, detail=True)
        begin = f"{path.rstrip('/')}/"
        listed = [
            (joined(address, name.removeprefix(begin)), _stat(info))
            for name, info in files_by_path.items()
            if name.startswith(begin)
        ]
        return sorted(listed, key=lambda entry: entry[0])

    def put(self, address: str, content: Path | bytes) -> None:
        files, path = self._open(address)
        with _translated_errors(address):
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(content, Path):
                files.put_file(str(content), path)
            else:
                files.pipe_file(path, content)

    def _open(self, address: str) -> tuple[Any, str]:
        import fsspec

        try:
            files, path = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise StorageError(
                f"{without_secrets(address)}: {without_secrets(str(error))} -> install the fsspec "
                f"file system of {self.scheme}://"
            ) from None
        return files, str(path)


@contextmanager
def _translated_errors(address: str) -> Iterator[None]:
    """Translate the errors that a file system raises."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{without_secrets(address)} does not exist") from None
    except PermissionError as error:
        raise AccessDeniedError(without_secrets(f"{address} cannot be read: {error}")) from None
    except (IsADirectoryError, NotImplementedError, ValueError) as error:
        raise unreadable(address, f"{type(error).__name__}: {error}") from None
    except Exception as error:  # transport errors differ between file systems
        raise TransientError(without_secrets(f"{type(error).__name__}: {error}")) from None


def _stat(info: dict[str, Any]) -> RemoteStat:
    size = info.get("size")
    version = next((str(info[key]) for key in VERSIONS if info.get(key)), None)
    lfs = info.get("lfs")
    if lfs is not None:  # a large file on the Hub has a checksum
        version = str(lfs["sha256"] if isinstance(lfs, dict) else getattr(lfs, "sha256", version))
    moment = next((info[key] for key in TIMES if info.get(key) is not None), None)
    modified = None
    if isinstance(moment, datetime):
        modified = round(moment.timestamp() * 1e6) * 1000
    elif isinstance(moment, (int, float)):
        modified = int(moment * 10**9)
    return RemoteStat(None if size is None else int(size), version, modified)
