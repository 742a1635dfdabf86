"""Connections to an outer server, of which strangers get few, and for a short time.

A connection is a stranger's from its acceptance until somebody signs a request on it. It gets a
protocol with its first byte: one that is opened and closed costs three system calls.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_STRANGERS, MOST_OF_ONE_HOST = 128, 64
"""Connections at once on which nobody has signed a request yet, of all and of one host."""
ACCEPTED_AT_ONCE = 8
"""Connections that one turn of the event loop accepts. Headers that came with a connection are read
four turns later: until then it must not be the oldest of `MOST_OF_ONE_HOST`, which is closed."""
BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""
HEADER_SECONDS = 10.0
"""Time from the acceptance of a connection to the headers of a signed request."""
MOST_HEADERS = 16 << 10
"""Bytes of the headers of an HTTP request."""
_PAUSE_SECONDS = 0.2
"""Time until a server without free file descriptors accepts again."""


STATE = "bigtrain.connection"
"""Name of a weak reference to the connection, in the state of its requests."""


class Stranger:
    """A connection on which nobody has signed a request yet: a socket without a byte, then a task
    with a TLS handshake, then a protocol."""

    def __init__(self, strangers: list[Stranger], connection: socket.socket, host: str) -> None:
        self.host, self.connection = host, connection
        self.protocol: GuardedConnection | None = None
        self.task: asyncio.Task[None] | None = None
        self._strangers = strangers
        self._loop = asyncio.get_running_loop()
        same_host = [stranger for stranger in strangers if stranger.host == host]
        # A site signs at once, so above a limit the oldest stranger is closed; `abort` removes it
        # from `strangers`.
        if len(same_host) >= MOST_OF_ONE_HOST:
            same_host[0].abort()
        elif len(strangers) >= MOST_STRANGERS:
            strangers[0].abort()
        strangers.append(self)
        self._timeout = self._loop.call_later(HEADER_SECONDS, self.abort)

    def leave(self) -> None:
        """Remove this connection from the strangers: it is closed, or its request was signed."""
        if self in self._strangers:
            self._strangers.remove(self)
        self._timeout.cancel()
        self.protocol = self.task = None  # which refer to this object: breaks the cycle

    def abort(self) -> None:
        """Close the connection at once, in whatever state it is."""
        protocol, task = self.protocol, self.task
        self.leave()
        if protocol is not None and protocol.transport is not None:
            protocol.transport.abort()
        elif task is not None:
            task.cancel()
        else:
            self._loop.remove_reader(self.connection)
            self.connection.close()


class GuardedConnection(H11Protocol):
    """A connection that is closed unless the headers of a signed request come in time, also while
    a response is sent or a body is ignored."""

    stranger: Stranger

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Weak, since memory of connections must not wait for the collector of cycles.
        self.app_state = {**self.app_state, STATE: weakref.ref(self)}

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.trust()
        super().connection_lost(exc)

    def trust(self) -> None:
        """Count the connection as a site's: a request on it was signed with the token."""
        self.stranger.leave()


class Listener:
    """Sockets that listen at all addresses of a host. on_error: called if one cannot accept."""

    def __init__(
        self,
        factory: Callable[[], GuardedConnection],
        sockets: list[socket.socket],
        tls: Any,
        on_error: Callable[[OSError], None],
    ) -> None:
        self.sockets = sockets
        self._factory, self._tls, self._on_error = factory, tls, on_error
        self._strangers: list[Stranger] = []  # oldest first
        self._loop = asyncio.get_running_loop()
        for listening in sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Stop listening."""
        for listening in self.sockets:
            if listening.fileno() >= 0:
                self._loop.remove_reader(listening)
                listening.close()
        for stranger in list(self._strangers):
            if stranger.protocol is None:  # uvicorn closes connections with a protocol
                stranger.abort()

    async def wait_closed(self) -> None:
        """Return at once: `close` leaves nothing to wait for."""

    def _accept(self, listening: socket.socket) -> None:
        """Accept a few connections; the next turn of the loop accepts more."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(listening, error)
                return
            connection.setblocking(False)
            self._serve_or_wait(Stranger(self._strangers, connection, str(address[0])))

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Free file descriptors, since all are in use, and accept again after a pause: without a
        pause, the loop would spin on the connections that wait."""
        self._on_error(error)
        for stranger in list(self._strangers):
            stranger.abort()
        self._loop.remove_reader(listening)

        def resume() -> None:
            if listening.fileno() >= 0:
                self._loop.add_reader(listening, self._accept, listening)

        self._loop.call_later(_PAUSE_SECONDS, resume)

    def _serve_or_wait(self, stranger: Stranger) -> None:
        """Serve a connection that has sent a byte, wait for its first byte, or close a connection
        that the other end has closed."""
        try:
            first_byte = stranger.connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(stranger.connection, self._serve_or_wait, stranger)
            return
        except OSError:
            first_byte = b""
        self._loop.remove_reader(stranger.connection)
        if first_byte:
            stranger.task = self._loop.create_task(self._serve(stranger))
        else:
            stranger.abort()

    async def _serve(self, stranger: Stranger) -> None:
        """Connect a protocol, after the handshake of TLS."""
        protocol = stranger.protocol = self._factory()
        protocol.stranger = stranger
        seconds = None if self._tls is None else HEADER_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, stranger.connection, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:  # a handshake that failed
            stranger.leave()


class GuardedLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers are a `Listener`. on_error: called with each exception that
    nothing else handles."""

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        super().__init__()
        self._on_error = on_error
        self.set_exception_handler(
            lambda _, context: on_error(
                context.get("exception") or RuntimeError(context.get("message", ""))
            )
        )

    async def create_server(  # type: ignore[override]  # what uvicorn uses of a server
        self, protocol_factory: Callable[[], Any], host: str, port: int, **kwargs: Any
    ) -> Listener:
        """Listen, as uvicorn asks for. Raises OSError if the port is in use."""
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets: list[socket.socket] = []
        try:
            for family, _, _, _, address in dict.fromkeys(infos):
                sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError:
            for listening in sockets:
                listening.close()
            raise
        return Listener(protocol_factory, sockets, kwargs.get("ssl"), self._on_error)
