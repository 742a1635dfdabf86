"""The HTTP side of an outer server: what is signed and whole reaches the ledger."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from bigtrain.engine.sites.figures import MESSAGE_REFUSED
from bigtrain.engine.sites.outer_server.ledger import Ledger, RefusedError
from bigtrain.engine.sites.outer_server.messages import (
    CORRUPT,
    FORGED,
    INSTANCE,
    MOST_BYTES,
    NONCE,
    OK,
    OTHER_START,
    REFUSED,
    SIGNATURE,
    TOO_LARGE,
    CorruptMessageError,
    Header,
    is_signed,
    pack,
    sign,
    unpack,
)

_BODIES_AT_ONCE = 4
_KNOWN_NONCES = 100_000
_LONGEST_NONCE = 64


class OuterServer:
    """Answers sites that know `token`.

    Memory: of `_BODIES_AT_ONCE` bodies at most, beside the ledger's. Whoever does not know the
    token is told no more than that.
    """

    def __init__(self, ledger: Ledger, token: bytes, say: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._token = token
        self._say = say
        self._instance = secrets.token_hex(8)
        self._nonces: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._room = asyncio.Semaphore(_BODIES_AT_ONCE)

    def application(self) -> Starlette:
        """The application that uvicorn serves."""
        return Starlette(routes=[Route("/{action}", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> Response:
        action = request.path_params["action"]
        nonce = request.headers.get(NONCE, "")[:_LONGEST_NONCE]
        if action == "wait":  # holds a thread and no memory
            return await self._reply(request, action, nonce)
        async with self._room:
            return await self._reply(request, action, nonce)

    async def _reply(self, request: Request, action: str, nonce: str) -> Response:
        host = request.client.host if request.client else "?"
        try:
            body = await _read(request)
        except ClientDisconnect:
            return Response(status_code=CORRUPT)
        if body is None:
            self._say(f"{host}: refused a message of more than {MOST_BYTES} bytes")
            return self._signed(TOO_LARGE, nonce, {"error": "the message is too large"})
        instance = request.headers.get(INSTANCE, "")
        signature = request.headers.get(SIGNATURE, "")
        status, header, payload = await run_in_threadpool(
            self._checked, host, action, (instance, nonce, signature), body
        )
        return self._signed(status, nonce, header, payload)

    def _checked(
        self, host: str, action: str, marks: tuple[str, str, str], body: bytes
    ) -> tuple[int, Header, bytes]:
        """What to reply: status, header, payload."""
        instance, nonce, signature = marks
        try:
            header, payload = unpack(body)
        except CorruptMessageError as error:
            self._ledger.note(MESSAGE_REFUSED, host, "corrupted")
            self._say(f"{host}: refused a corrupted message ({action}): {error}")
            return CORRUPT, {"error": f"the message came corrupted: {error}"}, b""
        if not is_signed(self._token, f"{action} {instance}", nonce, body, signature):
            self._ledger.note(MESSAGE_REFUSED, host, "forged")
            self._say(f"{host}: refused a message ({action}) that nobody signed who has the token")
            return FORGED, {"error": "the signature is not of this server's token"}, b""
        if action == "hello":
            return OK, {"instance": self._instance}, b""
        if instance != self._instance:
            return OTHER_START, {"error": "the server has started again"}, b""
        if not self._is_new(nonce):
            self._ledger.note(MESSAGE_REFUSED, host, "sent before")
            self._say(f"{host}: refused a message ({action}) that was sent before")
            return FORGED, {"error": "the message was sent before"}, b""
        try:
            reply, content = self._act(action, header, payload, body)
        except RefusedError as error:
            return REFUSED, {"error": str(error)}, b""
        except (KeyError, TypeError, ValueError) as error:
            return REFUSED, {"error": f"{action}: {error!r}"}, b""
        return OK, reply, content

    def _act(
        self, action: str, header: Header, payload: memoryview, body: bytes
    ) -> tuple[Header, bytes]:
        ledger = self._ledger
        if action == "weights":
            return ledger.weights(header)
        if action == "wait":
            base, heard = int(header["base"]), header.get("heard")
            heard = None if heard is None else int(heard)
            return ledger.wait(base, float(header["seconds"]), heard), b""
        site = int(header["site"])
        if site < 0:
            raise RefusedError(f"site {site}")
        if action == "join":
            return ledger.join(site, header), b""
        if action == "upload":
            ledger.upload(header, payload)
        elif action == "uploaded":
            ledger.uploaded()
        elif action == "contribute":
            ledger.contribute(site, header, payload, body)
        elif action == "deliver":
            return ledger.deliver(site, header), b""
        elif action == "leave":
            ledger.leave(site, str(header.get("reason", "")))
        else:
            raise RefusedError(f"no action {action!r}")
        return {}, b""

    def _is_new(self, nonce: str) -> bool:
        with self._lock:
            if not nonce or nonce in self._nonces:
                return False
            self._nonces[nonce] = None
            if len(self._nonces) > _KNOWN_NONCES:
                self._nonces.popitem(last=False)
            return True

    def _signed(self, status: int, nonce: str, header: Header, payload: bytes = b"") -> Response:
        body = pack(header, payload)
        signature = sign(self._token, f"reply {status}", nonce, body)
        return Response(body, status, {SIGNATURE: signature})


async def _read(request: Request) -> bytes | None:
    """The body; None if it is too large."""
    with suppress(ValueError):
        if int(request.headers.get("content-length", 0)) > MOST_BYTES:
            return None
    chunks, length = [], 0
    async for chunk in request.stream():
        length += len(chunk)
        if length > MOST_BYTES:
            return None
        chunks.append(chunk)
    return b"".join(chunks)
