"""The HTTP side of an outer server: only signed requests reach the state, and strangers to
the token are answered before any body is read. On Starlette and uvicorn."""

from __future__ import annotations

import asyncio
import gc
import re
import resource
import secrets
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from bigtrain.sites import protocol
from bigtrain.sites.metrics import MESSAGE_REFUSED
from bigtrain.sites.protocol import CorruptMessageError, Header, RefusedError
from bigtrain.sites.server.connections import (
    MOST_HEADERS,
    STATE,
    GuardedConnection,
    GuardedLoop,
)
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import ServerDirectory

BODIES_AT_ONCE = 4
_WAITING_AT_ONCE = 1024
_CHUNK_SECONDS = 20.0
_LEAST_RATE = 16 << 10
"""Bytes a second of a body, over all of it."""
_TICK_SECONDS = 0.1
IDLE_SECONDS = 3600.0
"""Silence of all sites after which a server that a site has started ends."""
_KNOWN_SESSIONS = 100_000
_KNOWN_HOSTS = 1000
_LONGEST_HEADER = 200
_NONCE = re.compile(r"([0-9a-f]{16})-([1-9][0-9]{0,14})")
_FIRST_NONCE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class _SignedHeaders:
    """Headers of a request that its signature covers, and the signature."""

    action: str
    instance: str
    nonce: str
    length: int
    digest: str
    signature: str

    @classmethod
    def of(cls, request: Request) -> _SignedHeaders:
        """Read the headers; the length is -1 if the request has none."""
        instance, nonce, digest, signature = (
            request.headers.get(name, "")[:_LONGEST_HEADER]
            for name in (protocol.INSTANCE, protocol.NONCE, protocol.DIGEST, protocol.SIGNATURE)
        )
        length_text = request.headers.get("content-length", "")
        length = int(length_text) if re.fullmatch(r"[0-9]{1,12}", length_text) else -1
        action = str(request.path_params["action"])[:_LONGEST_HEADER]
        return cls(action, instance, nonce, length, digest, signature)

    @property
    def limits(self) -> type[protocol.Request]:
        """The request's class, with the limits of its size."""
        return protocol.REQUESTS.get(self.action, protocol.Request)


class OuterServer:
    """Answers sites that know `token`.

    Headers are checked first: signature, start of the server, and a sequence number that is higher
    than any before in its session. Only then is a body read, of the length and with the digest that
    were signed; `BODIES_AT_ONCE` large ones at a time.
    """

    def __init__(self, state: OuterServerState, token: bytes, log: Callable[[str], None]) -> None:
        self._state = state
        self._token = token
        self._log = protocol.one_line_log(log)
        self._instance = secrets.token_hex(8)
        self._sessions: OrderedDict[str, str] = OrderedDict()  # by the nonce of the first message
        self._last: dict[str, int] = {}  # sequence number by session
        self._counts: Counter[tuple[str, str]] = Counter()  # of refusals and failures
        self._lock = threading.Lock()
        self._large_bodies = asyncio.Semaphore(BODIES_AT_ONCE)
        self._waiting = anyio.CapacityLimiter(_WAITING_AT_ONCE)

    def application(self) -> Starlette:
        """Return the application that uvicorn serves."""
        return Starlette(routes=[Route("/{action}", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        host = request.client.host if request.client else "?"
        signed = _SignedHeaders.of(request)
        refusal = self._refusal_by_headers(host, signed)
        if refusal is not None:
            status, text = refusal
            return self._signed_reply(status, signed.nonce, {"error": text})
        connection: GuardedConnection | None = request.scope["state"][STATE]()
        if connection is not None:
            connection.trust()
        # Requests with a large body, and `layout_of` with a large reply: a few at a time.
        is_large = signed.limits.most_bytes >= protocol.MOST_HEADER_BYTES
        if is_large or signed.action == "layout_of":
            async with self._large_bodies:
                return await self._reply(request, host, signed)
        return await self._reply(request, host, signed)

    def _refusal_by_headers(self, host: str, signed: _SignedHeaders) -> tuple[int, str] | None:
        """Return status and text of a refusal; None for a message whose body may be read."""
        action = signed.action
        # The sender has the token, and the body is of a size that its action may have.
        expected = protocol.request_signature(
            self._token,
            action,
            signed.instance,
            signed.nonce,
            signed.length,
            signed.digest,
        )
        if signed.length < 0 or not protocol.is_equal(expected, signed.signature):
            text = f"refused a message ({action}) that nobody signed who has the token"
            self._note(host, "forged", text)
            return protocol.FORGED, "the signature is not of this server's token"
        if signed.length > signed.limits.most_bytes:
            length = f"{signed.length:,} bytes"
            self._note(host, "too large", f"refused a message ({action}) of {length}")
            return protocol.TOO_LARGE, f"a message of {length} is too large"
        if action == "hello":
            return None
        # A message counts once: its number is larger than every earlier number in the session.
        if signed.instance != self._instance:
            return protocol.OTHER_START, "the server has started again"
        nonce = _NONCE.fullmatch(signed.nonce)
        session, number = (nonce[1], int(nonce[2])) if nonce else ("", 0)
        with self._lock:
            last = self._last.get(session)
            if last is None:
                return protocol.OTHER_START, "the session is not known any longer"
            if number <= last:
                self._note(
                    host, "sent before", f"refused a message ({action}) that was sent before"
                )
                return protocol.FORGED, "the message was sent before"
            self._last[session] = number
        return None

    async def _reply(self, request: Request, host: str, signed: _SignedHeaders) -> Response:
        try:
            body = await _read(request, signed.length)
        except (ClientDisconnect, TimeoutError):
            return Response(status_code=protocol.CORRUPT, headers={"connection": "close"})
        limiter = self._waiting if signed.action in protocol.POLLS else None
        status, header, payload = await anyio.to_thread.run_sync(
            self._handle_body, host, signed, body, limiter=limiter
        )
        if signed.action == "heartbeat" and status == protocol.OK and await _is_closed(request):
            fields, _ = protocol.unpack(body)
            self._state.hang_up(fields["site"], fields["run"])
        return self._signed_reply(status, signed.nonce, header, payload)

    def _handle_body(
        self, host: str, signed: _SignedHeaders, body: bytearray
    ) -> tuple[int, Header, bytes]:
        """Return the reply to a body whose headers were checked: status, header, payload."""
        action = signed.action
        try:
            if protocol.digest_of(body) != signed.digest:
                raise CorruptMessageError(f"checksum of {len(body)} bytes")
            header, payload = protocol.unpack(body, signed.limits.most_header_bytes)
        except CorruptMessageError as error:
            self._note(host, "corrupted", f"refused a corrupted message ({action}): {error}")
            return protocol.CORRUPT, {"error": f"the message came corrupted: {error}"}, b""
        try:
            fields = protocol.parse_request(action, header)
            if action == "hello":
                return protocol.OK, self._greet(signed.nonce), b""
            reply, content = self._state.act(action, fields, payload)
        except OSError as error:
            self._log(f"{host}: {action} could not be done yet, and the site asks again: {error}")
            return protocol.LATER, {"error": str(error)}, b""
        except Exception as error:  # of a site that has the token, whatever it is
            text = str(error) if isinstance(error, RefusedError) else repr(error)
            sender = f"site {header['site']}" if "site" in header else "a site"
            self._log(
                f"{host}: refused {action} of {sender}: {'; '.join(text.splitlines())[:1000]}"
            )
            return protocol.REFUSED, {"error": text}, b""
        return protocol.OK, reply, content

    def _greet(self, nonce: str) -> Header:
        """Return the ids of this start and of the session that the message with `nonce` begins; a
        repeated message gets the session that it has begun."""
        if not _FIRST_NONCE.fullmatch(nonce):
            raise RefusedError("the first message needs 32 random hexadecimal digits")
        with self._lock:
            session = self._sessions.pop(nonce, None)
            if session is None:
                session = secrets.token_hex(8)
                self._last[session] = 0
            self._sessions[nonce] = session
            if len(self._sessions) > _KNOWN_SESSIONS:
                _, oldest_session = self._sessions.popitem(last=False)
                self._last.pop(oldest_session, None)
        return {"instance": self._instance, "session": session}

    def _note(self, host: str, reason: str, text: str) -> None:
        """Log and report a refused message; repeated ones of a host seldom, so that no sender fills
        the log."""
        self._log_at_doubling(f"{host}: {text}", (host, reason))
        self._state.note(MESSAGE_REFUSED, host, reason)

    def note_failure(self, error: Exception) -> None:
        """Log a failure of a connection."""
        name = type(error).__name__
        self._log_at_doubling(f"a connection failed: {name}: {error}", ("", name))

    def _log_at_doubling(self, text: str, key: tuple[str, str]) -> None:
        """Write a line each time that the count of its `key` (host, reason) doubles."""
        if len(self._counts) > _KNOWN_HOSTS:
            self._counts.clear()
        self._counts[key] += 1
        count = self._counts[key]
        if count.bit_count() == 1:  # a power of two
            self._log(text + (f" ({count} such so far)" if count > 1 else ""))

    def _signed_reply(
        self, status: int, nonce: str, header: Header, payload: bytes = b""
    ) -> Response:
        body = protocol.pack(header, payload)
        headers = {protocol.SIGNATURE: protocol.sign(self._token, f"reply {status}", nonce, body)}
        if status != protocol.OK:
            headers["connection"] = "close"  # the remaining body is not read
        return Response(body, status, headers)


async def _read(request: Request, length: int) -> bytearray:
    """Return the body, of the length that was signed. Raises TimeoutError if nothing comes for
    `_CHUNK_SECONDS`, or less than `_LEAST_RATE` over all, ClientDisconnect if it ends early."""
    body, end, loop = bytearray(length), 0, asyncio.get_running_loop()
    body_deadline = loop.time() + _CHUNK_SECONDS + length / _LEAST_RATE
    async with asyncio.timeout(_CHUNK_SECONDS) as timeout:
        async for chunk in request.stream():
            body[end : end + len(chunk)] = chunk
            end += len(chunk)
            if end > length:
                break
            timeout.reschedule(min(body_deadline, loop.time() + _CHUNK_SECONDS))
    if end != length:
        raise ClientDisconnect
    return body


async def _is_closed(request: Request) -> bool:
    """Wait for `HEARTBEAT_SECONDS`; return whether the client has closed its connection by then."""
    try:
        async with asyncio.timeout(protocol.HEARTBEAT_SECONDS):
            while (await request.receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True)
class Place:
    """Address of a server. certificate, key: files of TLS, both or neither."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None


class HTTPServer(uvicorn.Server):
    """uvicorn with limits for those who do not know the token."""

    def __init__(self, server: OuterServer, address: Place) -> None:
        super().__init__(
            uvicorn.Config(
                server.application(),
                host=address.host,
                port=address.port,
                http=GuardedConnection,
                ws="none",
                h11_max_incomplete_event_size=MOST_HEADERS,
                log_level="error",  # the server itself logs what strangers send
                access_log=False,
                lifespan="off",
                ssl_certfile=address.certificate,
                ssl_keyfile=address.key,
            )
        )
        self._server = server

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until SIGINT, SIGTERM or `should_exit`."""
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        loop = partial(GuardedLoop, self._server.note_failure)
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(self.serve(sockets))


def serve(
    directory: Path,
    address: Place,
    token: bytes,
    rules: Rules,
    log: Callable[[str], None],
    *,
    until_left: bool = False,
) -> None:
    """Serve the run of `directory` (a new one where it is empty) until SIGINT or SIGTERM.

    until_left: or until every site that joined has left, or no site has sent a request for
    `IDLE_SECONDS`.
    """
    # Else the garbage collector scans all imported objects after every large message.
    gc.freeze()
    with closing(ServerDirectory(directory)) as store:
        state = OuterServerState(store, rules, log)
        server = HTTPServer(OuterServer(state, token, log), address)
        has_ended = threading.Event()

        def watch() -> None:
            while not has_ended.wait(_TICK_SECONDS):
                state.tick()
                if until_left and state.is_over(IDLE_SECONDS):
                    server.should_exit = True

        ticking = threading.Thread(target=watch, name="close-windows", daemon=True)
        ticking.start()
        try:
            server.run()
        finally:
            has_ended.set()
            ticking.join()
