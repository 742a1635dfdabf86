"""A real HTTP server in the test process, which keeps what it is sent."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Received:
    """A POST."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def tree(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """An HTTP server on a free port. A GET is answered once `opens` holds of its path and the POSTs
    so far.

    status: of its answers to POSTs, which are held until `release` if `held`. certificate: a file
    of key and certificate, for HTTPS.
    """

    def __init__(
        self, status: int = 200, certificate: Path | None = None, held: bool = False
    ) -> None:
        self.posts: list[Received] = []
        self.opens: Callable[[str, list[Received]], bool] = lambda *_: True
        self._changed = threading.Condition()
        self._released = threading.Event()
        if not held:
            self.release()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver._add(Received(self.path, dict(self.headers), body))
                receiver._released.wait(LIMIT_SECONDS)
                self._answer(status)

            def do_GET(self) -> None:
                receiver.wait_for(lambda posts: receiver.opens(self.path, posts))
                self._answer(200)

            def _answer(self, code: int) -> None:
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        scheme = "http"
        if certificate is not None:
            scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def _add(self, post: Received) -> None:
        with self._changed:
            self.posts.append(post)
            self._changed.notify_all()

    def release(self) -> None:
        """Answer POSTs from now on."""
        self._released.set()

    def wait_for(
        self, condition: Callable[[list[Received]], bool], seconds: float = LIMIT_SECONDS
    ) -> None:
        """Wait until `condition` holds of the POSTs."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.posts), seconds), self.posts

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
