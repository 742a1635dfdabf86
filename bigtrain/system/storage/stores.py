"""Interface and errors of every storage system, addresses (detection, parts, a form without
credentials), and retries after transient errors; `remote_file.store_of` selects the system."""

from __future__ import annotations

import logging
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from bigtrain.errors import DataError, without_secrets

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
"""Suffixes of files that contain a model's weights."""


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
        """Return whether the file is unchanged as far as both statuses show: by its version, or
        else by its time (listings and responses may report different fractions of a second)."""
        if self.size is not None and now.size is not None and self.size != now.size:
            return False
        if self.version is not None or now.version is not None:
            return self.version == now.version
        if self.modified_ns is None or now.modified_ns is None:
            return True
        return self.modified_ns // 10**9 == now.modified_ns // 10**9


class StorageError(DataError):
    """Failed access to an address; the text contains no secret."""


class NotFoundError(StorageError):
    """No file at the address."""


class AccessDeniedError(StorageError):
    """Permission denied or unauthenticated."""


class ModifiedError(StorageError):
    """File changed since it was listed."""


class TransientError(Exception):
    """Transient failure: a retry may succeed; the text is the reason."""


class Store(ABC):
    """Files of one scheme. Every method raises TransientError if a retry may
    help."""

    @abstractmethod
    def stat(self, address: str) -> RemoteStat:
        """Return the status. Raise NotFoundError, AccessDeniedError or StorageError."""

    @abstractmethod
    def read(
        self, address: str, begin: int, end: int | None, listed: RemoteStat
    ) -> Iterator[bytes | memoryview]:
        """Yield bytes [begin, end) as they arrive; without `end`, to the end of the file.

        Raises ModifiedError if it does not match `listed`, and the errors of `stat`.
        """

    @abstractmethod
    def find(self, address: str) -> list[tuple[str, RemoteStat]]:
        """Return all files below `address`, sorted; empty if there are none. Raise StorageError if
        the scheme has no directories."""

    @abstractmethod
    def put(self, address: str, content: Path | bytes) -> None:
        """Store `content`, the bytes or a file's, atomically."""


def changed(address: str) -> ModifiedError:
    """Return the error for a file that changed since it was listed."""
    return ModifiedError(
        f"{without_secrets(address)} was changed while it was read -> start again when it is "
        "complete"
    )


def unreadable(address: str, reason: object) -> StorageError:
    """Return the error for an unreadable `address`; its text contains no secret."""
    return StorageError(without_secrets(f"{address} cannot be read: {reason}"))


ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)


def is_address(name: str) -> bool:
    """Return whether `name` has a scheme, such as ``s3://`` or fsspec's ``zip://a::s3://b``."""
    return ADDRESS.match(name) is not None


def scheme_of(address: str) -> str:
    """Return the scheme in lower case; of a chain such as ``zip://a::s3://b`` the first one."""
    return re.split(r"::|://", address, maxsplit=1)[0].lower()


def name_of(address: str) -> str:
    """Return the path of an address without parameters, like a file name: ``.../a.jsonl.gz``."""
    if scheme_of(address) in ("http", "https"):
        address = re.split(r"[?#]", address, maxsplit=1)[0]
    return unquote(address.partition("::")[0] if "::" in address else address)


def joined(address: str, relative: str) -> str:
    """Return the address of the file `relative`, with slashes, below `address`."""
    return f"{address.rstrip('/')}/{relative}"


logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Retry policy: `tries` attempts in a row without a byte of progress are an error. The delay
    before a retry doubles from `first_s` to at most `longest_s` seconds, with jitter."""

    tries: int = 8
    first_s: float = 0.5
    longest_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep

    def wait(self, failed: int) -> None:
        """Sleep after `failed` failed attempts in a row."""
        seconds = min(self.longest_s, self.first_s * 2 ** (failed - 1))
        self.sleep(seconds * random.uniform(0.5, 1.0))


RETRIES = RetryPolicy()


def with_retries(address: str, action: str, act: Callable[[], T]) -> T:
    """Return `act()`, retried by `RETRIES` while it raises TransientError. Raise StorageError after
    the last attempt."""
    for failed in range(1, RETRIES.tries + 1):
        try:
            return act()
        except TransientError as error:
            reason = without_secrets(str(error))
            if failed == RETRIES.tries:
                raise StorageError(
                    f"{without_secrets(address)} {action} after {failed} attempts: {reason}"
                ) from None
            logger.warning("%s: %s; retrying", without_secrets(address), reason)
            RETRIES.wait(failed)
    raise AssertionError("there is at least one attempt")
