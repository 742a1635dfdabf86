"""Connections to an outer server, of which strangers get few, and for a short time."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_STRANGERS, MOST_OF_ONE_HOST = 128, 64
"""Connections at once on which nobody has signed a request yet, of all and of one host."""
HEADER_SECONDS = 10.0
"""Time that a connection has for the headers of a signed request."""
MOST_HEADERS = 16 << 10
"""Bytes of the headers of an HTTP request."""


STATE = "bigtrain.connection"
"""Name of a weak reference to the connection, in the state of its requests."""


class _Strangers:
    """The connections of one server on which nobody has signed a request yet, oldest first."""

    def __init__(self) -> None:
        self._open: OrderedDict[GuardedConnection, str] = OrderedDict()

    def add(self, connection: GuardedConnection, host: str) -> None:
        """Add one; the oldest goes where there are too many: whoever signs does so at once."""
        of_host = [one for one, its in self._open.items() if its == host]
        if len(of_host) >= MOST_OF_ONE_HOST:
            of_host[0].abort()
        elif len(self._open) >= MOST_STRANGERS:
            next(iter(self._open)).abort()
        self._open[connection] = host

    def remove(self, connection: GuardedConnection) -> None:
        """Remove one that is closed, or whose request was signed."""
        self._open.pop(connection, None)


class GuardedConnection(H11Protocol):
    """A connection that is closed unless the headers of a signed request come in time, also while
    a response is sent or a body is ignored."""

    strangers: _Strangers  # of one server, see `guarded`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Weak, since memory of connections must not wait for the collector of cycles.
        self.app_state = {**self.app_state, STATE: weakref.ref(self)}
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the time for the headers."""
        super().connection_made(transport)
        self.strangers.add(self, self.client[0] if self.client else "?")
        self._limit = self.loop.call_later(HEADER_SECONDS, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.trust()
        super().connection_lost(exc)

    def trust(self) -> None:
        """Somebody who has the token has signed a request on it."""
        self.strangers.remove(self)
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        self.strangers.remove(self)
        self.transport.abort()


def guarded() -> type[GuardedConnection]:
    """Return the class of the connections of one server."""
    return type("OwnGuardedConnection", (GuardedConnection,), {"strangers": _Strangers()})


class HandshakeLimitLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers give a TLS handshake `HEADER_SECONDS`: a connection is guarded
    only after it."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        """Listen, as uvicorn asks for."""
        if kwargs.get("ssl") is not None:
            kwargs["ssl_handshake_timeout"] = HEADER_SECONDS
        return await super().create_server(*args, **kwargs)
