"""Real servers on this machine: S3, HTTP, and a line between them and a client that breaks."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

S3_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-do-not-show",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: Any) -> None:
        """Ignore broken connections, which the tests cause."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Run a server of `handler` on a free port of this machine."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class WebServer:
    """Files of `folder`. `ranges`, `etags`, `dates`: what it can do; `password`: of user `me`;
    `early`: so many bytes before those asked for its ranges begin, as those of some caches."""

    folder: Path
    ranges: bool = True
    etags: bool = True
    dates: bool = True
    password: str | None = None
    early: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Path and range of each."""

    @contextmanager
    def running(self) -> Iterator[int]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                """Nothing on the screen."""

            def do_GET(self) -> None:
                site.answer(self)

        with serving(Handler) as port:
            yield port

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path, _, _ = request.path.partition("?")
        self.requests.append((request.path, request.headers.get("Range", "")))
        if self.password is not None:
            import base64

            wanted = "Basic " + base64.b64encode(f"me:{self.password}".encode()).decode()
            if request.headers.get("Authorization") != wanted:
                return _end(request, 401)
        file = self.folder / path.lstrip("/")
        if not file.is_file():
            return _end(request, 404)
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            begin, end, code = 0, status.st_size, 200
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
            if match and self.ranges:
                begin = int(match[1])
                end = min(end, int(match[2]) + 1) if match[2] else end
                if begin >= status.st_size:
                    return _end(request, 416, {"Content-Range": f"bytes */{status.st_size}"})
                begin, code = max(0, begin - self.early), 206
            request.send_response(code)
            request.send_header("Content-Length", str(end - begin))
            if code == 206:
                request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{status.st_size}")
            if self.etags:
                request.send_header("ETag", f'"{status.st_mtime_ns:x}-{status.st_size:x}"')
            if self.dates:
                request.send_header("Last-Modified", formatdate(status.st_mtime, usegmt=True))
            request.end_headers()
            request.wfile.flush()
            with suppress(OSError):  # the client has closed the connection
                while begin < end:
                    sent = os.sendfile(
                        request.connection.fileno(),
                        opened.fileno(),
                        begin,
                        min(1 << 20, end - begin),
                    )
                    begin += sent


def _end(request: BaseHTTPRequestHandler, code: int, headers: dict[str, str] | None = None) -> None:
    request.send_response(code)
    for name, value in {"Content-Length": "0", **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()


@contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """Buckets are the folders of `folder`. Answers only who signs, as servers of S3 do."""
    import logging

    from localbucket import S3Handler

    logging.getLogger("localbucket").setLevel(logging.ERROR)

    class Handler(S3Handler):
        data_root = folder

        def parse_request(self) -> bool:
            known = super().parse_request()
            signed = f"Credential={S3_VARIABLES['AWS_ACCESS_KEY_ID']}/"
            if known and signed not in self.headers.get("Authorization", ""):
                self.close_connection = True
                _end(self, 403)
                return False
            return known

    with serving(Handler) as port:
        yield port


@dataclass
class BreakingLine:
    """Between a client and the server at `port`: breaks each time that so many bytes of an answer,
    counted over all of them, have passed. `broken` counts."""

    port: int
    breaks: Sequence[int]
    passed: int = 0
    broken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[int]:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(0.05)
            ended = threading.Event()
            thread = threading.Thread(target=self._accept, args=[listener, ended])
            thread.start()
            stack.callback(thread.join)
            stack.callback(ended.set)
            yield listener.getsockname()[1]

    def _accept(self, listener: socket.socket, ended: threading.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                client, _ = listener.accept()
                client.setblocking(True)
                server = socket.create_connection(("127.0.0.1", self.port))
                for pair, counted in (((client, server), False), ((server, client), True)):
                    threading.Thread(target=self._pass, args=[*pair, counted], daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        """Send through a pipe, so that nothing is copied: also for measuring throughput."""
        reader, writer = os.pipe()
        with suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)
        try:
            while True:
                room = self._room() if counted else 1 << 16
                if room == 0:
                    break
                count = os.splice(source.fileno(), writer, room)
                if count == 0:
                    break
                if counted:
                    with self._lock:
                        self.passed += count
                left = count
                while left:
                    left -= os.splice(reader, target.fileno(), left)
        except OSError:
            pass
        finally:
            os.close(reader)
            os.close(writer)
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            if counted:
                source.close()
                target.close()

    def _room(self) -> int:
        """Return bytes until the next break; 0 where it is now, for one connection."""
        with self._lock:
            if self.broken == len(self.breaks):
                return 1 << 20
            left = self.breaks[self.broken] - self.passed
            if left <= 0:
                self.broken += 1
                return 0
            return min(left, 1 << 20)
