"""Outer servers in threads of this process, for sites that run in other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bigtrain.sites.server.app import HTTPServer, OuterServer, Place
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import ServerDirectory
from tests.support.worlds import free_port

TOKEN = b"0123456789abcdef0123456789abcdef"


@contextmanager
def outer_server(
    directory: Path,
    *,
    window_seconds: float,
    port: int | None = None,
    is_asynchronous: bool = False,
) -> Iterator[dict[str, Any]]:
    """Run a server with its state in `directory`, which it continues if it has one, and
    `server.log`; the settings with which sites reach it."""
    directory.mkdir(parents=True, exist_ok=True)
    token_file = directory / "token"
    token_file.write_bytes(TOKEN)

    def log(text: str) -> None:
        with (directory / "server.log").open("a") as file:
            file.write(f"{text}\n")

    store = ServerDirectory(directory / "state")
    state = OuterServerState(store, Rules(is_asynchronous, window_seconds), log)
    port = port or free_port()
    server = HTTPServer(OuterServer(state, TOKEN, log), Place("127.0.0.1", port))
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
        store.close()


def rounds(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a server that has ended, oldest first; the initial weights are the
    first."""
    with closing(ServerDirectory(directory)) as store:
        return store.records_after(-1, limit=1_000_000)
