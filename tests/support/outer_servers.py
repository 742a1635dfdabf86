"""Outer servers in threads of this process, for sites that run in other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from bigtrain.sites.server.app import OuterServer
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.serve import Place, configured
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import Store
from tests.support.worlds import free_port

TOKEN = b"0123456789abcdef0123456789abcdef"


@contextmanager
def outer_server(directory: Path, *, window_seconds: float) -> Iterator[dict[str, Any]]:
    """A server with its state in `directory`; the settings with which sites reach it."""
    directory.mkdir()
    token_file = directory / "token"
    token_file.write_bytes(TOKEN)
    log: list[str] = []
    state = OuterServerState(Store(directory / "state"), Rules(False, window_seconds), log.append)
    port = free_port()
    place = Place("127.0.0.1", port)
    server = uvicorn.Server(configured(OuterServer(state, TOKEN, log.append), place))
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.1):
            state.tick()

    threads = [threading.Thread(target=work) for work in (server.run, tick)]
    for thread in threads:
        thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield {"server": f"http://127.0.0.1:{port}", "token_file": str(token_file)}
    finally:
        server.should_exit = True
        ended.set()
        for thread in threads:
            thread.join(20)
