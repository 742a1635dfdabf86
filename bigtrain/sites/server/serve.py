"""Runs an outer server until a signal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from bigtrain.sites.server.app import OuterServer
from bigtrain.sites.server.connections import MOST_HEADERS, guarded
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import Store

_TICK_SECONDS = 0.1


@dataclass(frozen=True)
class Place:
    """Where a server listens. certificate, key: files of TLS, both or neither."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None


def configured(server: OuterServer, place: Place) -> uvicorn.Config:
    """Return how uvicorn serves `server`: with limits for those who do not know the token."""
    return uvicorn.Config(
        server.application(),
        host=place.host,
        port=place.port,
        http=guarded(),
        ws="none",
        h11_max_incomplete_event_size=MOST_HEADERS,
        log_level="error",  # what strangers send is named by the server itself
        access_log=False,
        lifespan="off",
        ssl_certfile=place.certificate,
        ssl_keyfile=place.key,
    )


def serve(
    directory: Path, place: Place, token: bytes, rules: Rules, say: Callable[[str], None]
) -> None:
    """Serve the run of `directory` (a new one where it is empty) until SIGINT or SIGTERM."""
    state = OuterServerState(Store(directory), rules, say)
    server = OuterServer(state, token, say)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_TICK_SECONDS):
            state.tick()

    ticking = threading.Thread(target=watch, name="windows", daemon=True)
    ticking.start()
    try:
        uvicorn.Server(configured(server, place)).run()
    finally:
        ended.set()
        ticking.join()
