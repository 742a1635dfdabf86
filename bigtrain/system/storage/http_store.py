"""Files of web servers, through requests: redirects, proxies and ~/.netrc work as usual."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
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
    unreadable,
)

TIMEOUT_S = (10.0, 60.0)
"""Timeout to connect, and between two chunks of a response."""
CHUNK_BYTES = 1 << 18
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a retry of the same request may succeed."""


class HttpStore(Store):
    """Store that needs only GET from a server; with ranges a lost connection is resumed, without
    them the file is read from the start to that position."""

    def stat(self, address: str) -> RemoteStat:
        # Not HEAD: a URL that is signed for GET is rejected for HEAD.
        with self._get(address, {"Range": "bytes=0-0"}) as answer:
            return _stat(answer)

    def read(
        self, address: str, begin: int, end: int | None, listed: RemoteStat
    ) -> Iterator[bytes | memoryview]:
        last = "" if end is None else str(end - 1)
        headers = {"Range": f"bytes={begin}-{last}"}
        with self._get(address, headers) as answer:
            if not listed.is_same(_stat(answer)):
                raise changed(address)
            # The response begins at the file's start, unless it is a range (status 206).
            match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
            response_begin = int(match[1]) if match and answer.status_code == 206 else 0
            skip = begin - response_begin
            if skip < 0:
                raise unreadable(address, "the server sends a different range than requested")
            num_bytes = None if end is None else end - begin
            if num_bytes is None and listed.size is not None:
                num_bytes = listed.size - begin
            yield from _body(answer, skip, num_bytes)

    def find(self, address: str) -> list[tuple[str, RemoteStat]]:
        raise StorageError(
            f"{without_secrets(address)}: a web server cannot list files -> name each file"
        )

    def put(self, address: str, content: Path | bytes) -> None:
        raise StorageError(f"{without_secrets(address)}: copying to a web server is not supported")

    @contextmanager
    def _get(self, address: str, headers: dict[str, str]) -> Iterator[Any]:
        import requests

        # Read the stored bytes, not a re-encoded form.
        headers = {"Accept-Encoding": "identity", **headers}
        try:
            answer = requests.get(address, headers=headers, stream=True, timeout=TIMEOUT_S)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise TransientError(_reason(error)) from None
        except requests.RequestException as error:
            raise unreadable(address, _reason(error)) from None
        with answer:
            if answer.status_code in AGAIN:
                raise TransientError(f"the server responds {answer.status_code} {answer.reason}")
            if answer.status_code in (404, 410):
                raise NotFoundError(
                    f"{without_secrets(address)} does not exist ({answer.status_code})"
                )
            if answer.status_code in (401, 403):
                raise AccessDeniedError(
                    f"{without_secrets(address)} cannot be read: {answer.status_code} "
                    f"{answer.reason} -> give the server's user and password in ~/.netrc"
                )
            if answer.status_code not in (200, 206, 416):
                raise unreadable(address, f"the server responds {answer.status_code}")
            yield answer


def _body(answer: Any, skip: int, num_bytes: int | None) -> Iterator[bytes]:
    """Yield `num_bytes` bytes of a response, after `skip` bytes."""
    from urllib3.exceptions import HTTPError

    try:
        while num_bytes is None or num_bytes > 0:
            chunk_bytes = CHUNK_BYTES if num_bytes is None else min(CHUNK_BYTES, skip + num_bytes)
            chunk = answer.raw.read(chunk_bytes, decode_content=False)
            if not chunk:
                break
            if skip:
                skip, chunk = skip - min(skip, len(chunk)), chunk[skip:]
            if chunk:
                num_bytes = None if num_bytes is None else num_bytes - len(chunk)
                yield chunk
    except (HTTPError, OSError) as error:
        raise TransientError(_reason(error)) from None
    if num_bytes:
        raise TransientError("the connection ended early")


def _stat(answer: Any) -> RemoteStat:
    """Build the stat from the headers of a GET response, with or without a range."""
    headers = answer.headers
    size: int | None = None
    total = headers.get("Content-Range", "").rpartition("/")[2]
    if total.isdigit():
        size = int(total)
    elif answer.status_code == 200 and headers.get("Content-Length", "").isdigit():
        size = int(headers["Content-Length"])
    modified = None
    if "Last-Modified" in headers:
        try:
            moment = parsedate_to_datetime(headers["Last-Modified"])
            modified = int(moment.timestamp()) * 10**9
        except ValueError:
            modified = None
    return RemoteStat(size, headers.get("ETag"), modified)


def _reason(error: Exception) -> str:
    """Return the reason of the error without the address, which libraries repeat."""
    inner: Any = error
    while getattr(inner, "args", None) and isinstance(inner.args[-1], BaseException):
        inner = inner.args[-1]
    reason = getattr(inner, "reason", None)
    return without_secrets(f"{type(error).__name__}: {reason or inner}")
