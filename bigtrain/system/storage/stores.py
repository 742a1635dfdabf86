"""Interface and errors of every storage system; `open_store` selects the implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import DataError
from bigtrain.system.storage.addresses import without_secrets


@dataclass(frozen=True)
class RemoteStat:
    """Status of a file as it was listed. `size` in bytes, None if the server does not report it.

    `version`: its ETag, or another value that changes with its content; None if there is none.
    `modified_ns`: since 1970.
    """

    size: int | None
    version: str | None = None
    modified_ns: int | None = None

    def is_same(self, now: RemoteStat) -> bool:
        """Return whether the file is unchanged: by its version, or else by its time (listings and
        responses may report different fractions of a second)."""
        if self.size is not None and now.size is not None and self.size != now.size:
            return False
        if self.version is not None or now.version is not None:
            return self.version == now.version
        if self.modified_ns is None or now.modified_ns is None:
            return True
        return self.modified_ns // 10**9 == now.modified_ns // 10**9


class StorageError(DataError):
    """Failed access to an address; the text contains no secret."""


class Gone(StorageError):
    """No file at the address."""


class Refused(StorageError):
    """Permission denied or unauthenticated."""


class Changed(StorageError):
    """File changed since it was listed."""


class Broken(Exception):
    """Transient failure: a retry may succeed; the text is the reason."""


class Store(ABC):
    """Files of one scheme. Every method raises `Broken` if a retry may help."""

    @abstractmethod
    def stat(self, address: str) -> RemoteStat:
        """Return the status. Raise Gone, Refused or StorageError."""

    @abstractmethod
    def read(
        self, address: str, begin: int, end: int | None, known: RemoteStat
    ) -> Iterator[bytes | memoryview]:
        """Yield bytes [begin, end) as they arrive; without `end`, to the end of the file.

        Raises Changed if it does not match `known`, and the errors of `stat`.
        """

    @abstractmethod
    def find(self, address: str) -> list[tuple[str, RemoteStat]]:
        """Return all files below `address`, sorted; empty if there are none. Raise StorageError if
        the scheme has no directories."""

    @abstractmethod
    def put(self, address: str, file: Path) -> None:
        """Store `file` atomically."""

    @abstractmethod
    def put_bytes(self, address: str, content: bytes) -> None:
        """Store `content` atomically."""


def changed(address: str) -> Changed:
    """Return the error for a file that changed since it was listed."""
    return Changed(
        f"{without_secrets(address)} was changed while it was read -> start again when it is "
        "complete"
    )


def unreadable(address: str, why: object, remedy: str = "") -> StorageError:
    """Return the error for an unreadable `address`; its text contains no secret."""
    text = f"{address} cannot be read: {why}"
    return StorageError(without_secrets(text) + (f" -> {remedy}" if remedy else ""))
