"""What every place of files is asked for, and how that can fail; `open_store` has the places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import DataError
from bigtrain.system.storage.addresses import without_secrets


@dataclass(frozen=True)
class RemoteStat:
    """A file as it was listed. `size` in bytes, None where the server does not say.

    `version`: its ETag, or what else changes with its content; None if there is nothing.
    `modified_ns`: since 1970.
    """

    size: int | None
    version: str | None = None
    modified_ns: int | None = None

    def is_same(self, now: RemoteStat) -> bool:
        """Whether the file is, as far as can be told, as it was: by its version, or else its time,
        of which lists and answers may know different fractions of a second."""
        if self.size is not None and now.size is not None and self.size != now.size:
            return False
        if self.version is not None or now.version is not None:
            return self.version == now.version
        if self.modified_ns is None or now.modified_ns is None:
            return True
        return self.modified_ns // 10**9 == now.modified_ns // 10**9


class StorageError(DataError):
    """Something at an address cannot be read or written; the text holds no secret."""


class Gone(StorageError):
    """There is nothing at the address."""


class Refused(StorageError):
    """The server knows who asks and does not allow it, or does not know who asks."""


class Changed(StorageError):
    """The file is another than it was when it was listed."""


class Broken(Exception):
    """A request that may succeed when it is made again; the text is the reason."""


class Store(ABC):
    """Files of one scheme. Every method raises `Broken` where another try may help."""

    @abstractmethod
    def stat(self, address: str) -> RemoteStat:
        """Raises Gone, Refused or StorageError."""

    @abstractmethod
    def read(
        self, address: str, begin: int, end: int | None, known: RemoteStat
    ) -> Iterator[bytes | memoryview]:
        """Bytes [begin, end) as they arrive, to the end of the file without `end`.

        Raises Changed where it is not as `known`, and the errors of `stat`.
        """

    @abstractmethod
    def find(self, address: str) -> list[tuple[str, RemoteStat]]:
        """All files below `address`, sorted; none where there are none. Raises StorageError where
        the scheme has no directories."""

    @abstractmethod
    def put(self, address: str, file: Path) -> None:
        """Store `file`, so that it is there completely or not at all."""

    @abstractmethod
    def put_bytes(self, address: str, content: bytes) -> None:
        """As `put`."""


def changed(address: str) -> Changed:
    """The error for a file that is another than was listed."""
    return Changed(
        f"{without_secrets(address)} was changed while it was read -> start again when it is "
        "complete"
    )


def unreadable(address: str, why: object, remedy: str = "") -> StorageError:
    """The error for what cannot be read at `address`; no secret is left in it."""
    text = f"{address} cannot be read: {why}"
    return StorageError(without_secrets(text) + (f" -> {remedy}" if remedy else ""))
