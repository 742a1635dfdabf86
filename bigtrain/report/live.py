"""Server of the page of running runs, on this machine only, with incremental updates.

The browser polls every two seconds. It sends its state (version of the file, width and number of
complete buckets) and gets the buckets after these, or the full curves if the file was truncated or
the buckets became wider.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from bigtrain.errors import DataError, LaunchError
from bigtrain.report.charts import charts_data, run_data
from bigtrain.report.marks import marks_of
from bigtrain.report.metrics_file import TABLES
from bigtrain.report.page import page_html, sections_html
from bigtrain.report.run_files import Run
from bigtrain.system.listening import try_port

ADDRESS = "127.0.0.1"
POLL_SECONDS = 2.0
_LOCAL_HOST_NAMES = ("127.0.0.1", "localhost", "[::1]")
_PORTS_TRIED = 50


class LivePage:
    """The current state of runs; reads new lines of metrics files on request. Thread-safe."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._revision = 1
        self._read_at = -1.0

    def html(self) -> bytes:
        """Return the complete page."""
        with self._lock:
            self._refresh()
            return page_html(self._runs, self._live()).encode()

    def news(self, revision: int, have: str) -> bytes | None:
        """Return the update for a browser that has `revision` and the buckets `have`; None if it is
        up to date. have: for each run ``VERSION:WIDTH:COMPLETE:...``, with width and number of
        complete buckets for every table of `TABLES`; joined by commas."""
        with self._lock:
            self._refresh()
            if revision == self._revision:
                return None
            marks = [marks_of(run) for run in self._runs]
            since = _first_buckets(self._runs, have)
            answer = {
                "charts": charts_data(self._runs),
                "runs": list(map(run_data, self._runs, marks, since)),
                "sections": sections_html(self._runs, marks, is_live=True),
                **self._live(),
            }
            return json.dumps(answer, allow_nan=False).encode()

    def _live(self) -> dict[str, Any]:
        """Return what a page needs to poll for updates."""
        return {"live": True, "revision": self._revision, "poll_seconds": POLL_SECONDS}

    def _refresh(self) -> None:
        """Read new lines, at most once a second regardless of the number of browsers."""
        now = time.monotonic()
        if self._read_at >= 0 and now - self._read_at < POLL_SECONDS / 2:
            return
        self._read_at = now
        changed = False
        for run in self._runs:
            try:
                changed |= run.read()
            except DataError:
                continue  # being replaced by a resume, or removed: keep showing the old data
        self._revision += changed


def _first_buckets(runs: Sequence[Run], have: str) -> list[dict[str, int]]:
    """Return, by run and table, the first bucket that a browser with the buckets `have` lacks. A
    table of which it lacks all buckets is omitted, as are all tables if `have` is malformed."""
    first_buckets: list[dict[str, int]] = [{} for _ in runs]
    try:
        states = [[int(number) for number in state.split(":")] for state in have.split(",")]
    except ValueError:
        return first_buckets
    state_length = 1 + 2 * len(TABLES)
    if len(states) != len(runs) or any(len(state) != state_length for state in states):
        return first_buckets
    for run, (version, *sizes), bucket_by_table in zip(runs, states, first_buckets, strict=True):
        if version != run.metrics.version:
            continue
        for name, width, num_complete in zip(TABLES, sizes[::2], sizes[1::2], strict=True):
            table = run.metrics.table(name)
            if width == table.width and 0 <= num_complete <= table.num_complete:
                bucket_by_table[name] = num_complete
    return first_buckets


class _Handler(BaseHTTPRequestHandler):
    """Handler of the page (``/``) and its updates (``/data``)."""

    server: _Server

    def do_GET(self) -> None:
        # Refuse DNS rebinding: another host's name that resolves to this machine, so that a page
        # of the other host could read the answer.
        if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in _LOCAL_HOST_NAMES:
            self._answer(403, b"requested under a name other than localhost")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._answer(200, self.server.page.html(), "text/html; charset=utf-8")
        elif address.path == "/data":
            query = parse_qs(address.query)
            seen, have = query.get("seen", [""])[0], query.get("have", [""])[0]
            revision = int(seen) if seen.isdigit() else 0
            news = self.server.page.news(revision, have)
            self._answer(204 if news is None else 200, news or b"", "application/json")
        else:
            self._answer(404, b"only / and /data exist")

    def _answer(
        self, code: int, body: bytes, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(code)
        if code != 204:
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since a line for every poll would fill the terminal."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: LivePage

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a browser may close the connection at any time."""


def open_server(runs: Sequence[Run], port: int) -> ThreadingHTTPServer:
    """Return the server, bound to its ``server_address`` but not serving yet.

    Raises LaunchError, which names the nearest free port, if `port` is in use.
    """
    try:
        server = _Server((ADDRESS, port), _Handler)
    except OSError as error:
        free = _free_port(port)
        suggestion = "" if free is None else f" -> --port {free} is free"
        raise LaunchError(
            f"--port {port}: cannot be opened on {ADDRESS}: {error.strerror or error}{suggestion}"
        ) from error
    server.page = LivePage(runs)
    return server


def _free_port(busy_port: int) -> int | None:
    """Return the nearest free port after (else before) `busy_port`, from 1024 on."""
    after: range = range(max(busy_port + 1, 1024), min(busy_port + _PORTS_TRIED, 65535) + 1)
    before = range(min(busy_port, 65536) - 1, max(busy_port - _PORTS_TRIED, 1024) - 1, -1)
    for port in (*after, *before):
        with suppress(OSError):
            return try_port(port, ADDRESS)
    return None
