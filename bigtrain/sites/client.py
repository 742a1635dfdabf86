"""HTTP client of an outer server: signs requests, and retries until a deadline."""

from __future__ import annotations

import copy
import http.client
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bigtrain.errors import LaunchError
from bigtrain.sites import protocol
from bigtrain.sites.protocol import CorruptMessageError, Header

_SHORTEST_TOKEN = 16  # bytes
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
_SILENCE_SECONDS = 60.0
"""Timeout of a connection on which nothing moves, in addition to the ``seconds`` of a poll."""


class DetachedError(LaunchError):
    """A request that the server did not grant: the site trains alone."""


class UnreachableError(DetachedError):
    """Timeout of the server; the text names the last failure."""


class RefusedByServerError(DetachedError):
    """Refusal by the server, with its reason."""


class ServerClient:
    """Client of the server at `address`, ``http://HOST:PORT`` or ``https://HOST:PORT``.

    For one thread only, since the numbers of a session must ascend: see `clone`. token: shared with
    the server, never sent. certificate: of the server or its issuer; None: the system's.
    num_bytes: of payloads sent so far.
    """

    def __init__(self, address: str, token: bytes, certificate: Path | None = None) -> None:
        self.address = address
        parts = urlsplit(address)
        assert parts.hostname is not None
        self._connect: Callable[..., http.client.HTTPConnection]
        self._connect = partial(http.client.HTTPConnection, parts.hostname, parts.port)
        if parts.scheme == "https":
            tls = ssl.create_default_context(cafile=certificate)
            self._connect = partial(
                http.client.HTTPSConnection, parts.hostname, parts.port, context=tls
            )
        self._token = token
        # The ids of the server's start and of a session, empty before `hello`.
        self._instance, self._session = "", ""
        self._sequence = 0
        self.num_bytes = 0

    def clone(self) -> ServerClient:
        """Return a client of this server for another thread."""
        client = copy.copy(self)
        client._instance, client._session = "", ""
        client._sequence, client.num_bytes = 0, 0
        return client

    def ask(
        self, action: str, header: Mapping[str, Any], payload: bytes = b"", *, deadline: float
    ) -> tuple[Header, memoryview]:
        """Return header and payload of the reply to `action`. Retries until `deadline` (of
        `time.monotonic`) if nobody answers, or a message was corrupted on the way.

        Raises UnreachableError, RefusedByServerError.
        """
        body = protocol.pack(header, payload)
        silence = _SILENCE_SECONDS + float(header.get("seconds", 0))
        pause, failure = _FIRST_PAUSE_SECONDS, "the deadline is over"
        while (remaining_seconds := deadline - time.monotonic()) > 0:
            try:
                if not self._instance and action != "hello":
                    hello, _ = self.ask("hello", {}, deadline=deadline)
                    self._session, self._sequence = str(hello["session"]), 0
                    self._instance = str(hello["instance"])
                status, reply, content = self._try(action, body, min(remaining_seconds, silence))
            except (OSError, http.client.HTTPException, CorruptMessageError) as error:
                failure = f"{type(error).__name__}: {error}"
                # The server may have refused the headers, and closed before the body was sent:
                # the next try begins a new session.
                self._instance = ""
            else:
                if status == protocol.OK:
                    self.num_bytes += len(payload)
                    return reply, content
                failure = str(reply.get("error", f"status {status}"))
                if status == protocol.OTHER_START:
                    self._instance = ""
                elif status in (protocol.REFUSED, protocol.FORGED):
                    raise RefusedByServerError(failure)
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        raise UnreachableError(f"{self.address} did not answer in time ({failure})")

    def _try(self, action: str, body: bytes, seconds: float) -> tuple[int, Header, memoryview]:
        """Return status, header and payload of the signed reply to one request."""
        self._sequence += 1
        nonce = secrets.token_hex(16)
        if action != "hello":
            nonce = f"{self._session}-{self._sequence}"
        digest, instance = protocol.digest_of(body), self._instance
        signature = protocol.request_signature(
            self._token, action, instance, nonce, len(body), digest
        )
        headers = {
            protocol.NONCE: nonce,
            protocol.INSTANCE: instance,
            protocol.DIGEST: digest,
            protocol.SIGNATURE: signature,
        }
        connection = self._connect(timeout=seconds)
        try:
            connection.request("POST", f"/{action}", body, headers)
            response = connection.getresponse()
            content = response.read(protocol.MOST_BYTES + 1)
            reply_signature = response.headers.get(protocol.SIGNATURE, "")
            status = response.status
        finally:
            connection.close()
        if not reply_signature:  # the reply of a proxy, or of a server that failed
            raise http.client.HTTPException(f"status {status} that the server did not sign")
        header, payload = protocol.unpack(content)
        expected = protocol.sign(self._token, f"reply {status}", nonce, content)
        if not protocol.is_equal(expected, reply_signature):
            forged = {"error": "the reply is not signed with sites.token_file"}
            return protocol.FORGED, forged, payload
        return status, header, payload


def read_token(path: Path) -> bytes:
    """Return the token in a file, without white space around it. Raises LaunchError."""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise LaunchError(f"the token of the outer server cannot be read: {error}") from error
    if len(token) < _SHORTEST_TOKEN:
        raise LaunchError(
            f"{path}: a token of {len(token)} bytes, which can be guessed -> at least "
            f"{_SHORTEST_TOKEN}: openssl rand -hex 32 > {path}"
        )
    return token
