"""Strangers at an outer server over HTTP, and whoever is slow: sites are served next to them."""

from __future__ import annotations

import errno
import json
import resource
import socket
import struct
import threading
import tracemalloc
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import xxhash

from bigtrain.sites import protocol
from bigtrain.sites.client import ServerClient
from bigtrain.sites.protocol import (
    DIGEST,
    INSTANCE,
    NONCE,
    SIGNATURE,
    digest_of,
    pack,
    request_signature,
)
from bigtrain.sites.server import app, connections, members
from bigtrain.sites.server.connections import MOST_HEADERS, MOST_OF_ONE_HOST, MOST_STRANGERS
from tests.support.outer_servers import TOKEN as OWN_TOKEN
from tests.support.outer_servers import outer_server
from tests.support.worlds import free_port
from tests.unit.sites.server.test_app import (
    DELIVERY,
    JOIN,
    TOKEN,
    Served,
    answer,
    ask,
    own_certificate,
    run_of,
    serving,
    unsigned,
)
from tests.unit.sites.server.test_app import served as served


def test_strangers_are_answered_before_any_body_is_read(served: Served) -> None:
    """And as they wait for nothing, they hold nothing: unfinished bodies."""
    port = served.port
    for _ in range(130):  # of 16 MiB each, which do not come
        assert answer(port, unsigned("wait", 16 << 20, b"x")).startswith(b"HTTP/1.1 401")
    for request in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /join HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"\x16\x03\x01 nothing of HTTP\r\n\r\n",
        b"POST /join HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (1 << 20),
    ):
        assert not answer_of(port, request).startswith((b"HTTP/1.1 2", b"HTTP/1.1 5"))
    assert ask(served.client, "join", **JOIN)[0]["uploads"]
    text = "127.0.0.1: refused a message (wait) that nobody signed who has the token"
    assert [line for line in served.said if line.startswith(text)] == [
        text,
        *(f"{text} ({2**n} such so far)" for n in range(1, 8)),
    ]


def answer_of(port: int, request: bytes) -> bytes:
    """What comes first."""
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        try:
            raw.sendall(request)
            return raw.recv(1 << 16)
        except ConnectionError:
            return b""


def test_sites_are_answered_beside_strangers_that_send_a_byte_and_stall(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers that do not end, of more connections than a host may have: the oldest go."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 1000.0)
    with ExitStack() as stack:
        stalled = []
        for number in range(MOST_OF_ONE_HOST + 20):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 10))
            raw.sendall(b"P" if number % 2 else unsigned("contribute", 1 << 20)[:-2])
            stalled.append(raw)
        assert ask(served.client, "join", **JOIN)[0]["uploads"]
        assert ask(served.client, "wait", base=0, seconds=0)[0]["number"] == 0
        with suppress(ConnectionError):
            assert stalled[0].recv(10) == b""  # closed


def test_a_signed_request_between_strangers_that_came_at_once_is_answered(tmp_path: Path) -> None:
    """Also if all of them wait when the server comes to accept them, from one address."""
    said: list[str] = []
    port = free_port()
    client = ServerClient(f"http://127.0.0.1:{port}", TOKEN)
    with serving(tmp_path, said, port) as server, ExitStack() as stack:
        ask(client, "join", **JOIN)
        body = pack({"site": 0, "run": run_of(0), "base": -1, "seconds": 0.0})
        held, is_held = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            held.wait(60)

        server.servers[0]._loop.call_soon_threadsafe(hold)
        is_held.wait(60)

        def strangers(count: int) -> None:
            for _ in range(count):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))

        strangers(300)
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        raw.sendall(signed(client, "wait", body) + body)
        strangers(300)
        held.set()
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


def test_a_server_without_file_descriptors_serves_sites_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops strangers, pauses, and reports the failure each time that their count doubles."""
    monkeypatch.setattr(connections, "_PAUSE_SECONDS", 0.001)
    said: list[str] = []
    port = free_port()
    accept, failures = socket.socket.accept, iter(range(20))

    def failing(self: socket.socket) -> Any:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    with serving(tmp_path, said, port):
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            stranger.sendall(b"P")
            clients = [ServerClient(f"http://127.0.0.1:{port}", TOKEN) for _ in range(2)]
            ask(clients[0], "wait", base=-1, seconds=0.0)  # accepted after the stranger
            monkeypatch.setattr(socket.socket, "accept", failing)
            assert ask(clients[1], "join", **JOIN)
            with suppress(ConnectionError):
                assert stranger.recv(1) == b""
    text = "a connection failed: OSError: [Errno 24] Too many open files"
    lines = [line for line in said if line.startswith(text)]
    assert lines == [text, *(f"{text} ({2**n} such so far)" for n in range(1, 5))]


def test_a_connection_has_a_time_for_its_headers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it sends nothing more, or one byte after the other."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.05)
    for start in (b"", b"POST /jo", unsigned("join", 100)[:-1]):
        assert answer(served.port, start) == b""
    with socket.create_connection(("127.0.0.1", served.port), 10) as raw:
        raw.sendall(unsigned("contribute", 1 << 20)[:-2])
        raw.settimeout(0.01)
        reply = b"-"
        while reply:
            with suppress(ConnectionError):
                raw.send(b"a")
            reply = b""
            with suppress(ConnectionError):
                try:
                    reply = raw.recv(1)
                except TimeoutError:
                    reply = b"-"
    assert ask(served.client, "wait", base=-1, seconds=0.2)[0]["number"] == 0


def signed(client: ServerClient, action: str, body: bytes, token: bytes = TOKEN) -> bytes:
    """The headers of a request of `client`, which has said hello."""
    client._sequence += 1
    nonce, digest = f"{client._session}-{client._sequence}", digest_of(body)
    signature = request_signature(token, action, client._instance, nonce, len(body), digest)
    headers = {
        "Host": "x",
        "Content-Length": len(body),
        NONCE: nonce,
        INSTANCE: client._instance,
        DIGEST: digest,
        SIGNATURE: signature,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST /{action} HTTP/1.1\r\n{lines}\r\n".encode()


@pytest.mark.parametrize("limit", ["_CHUNK_SECONDS", "_LEAST_RATE"])
def test_a_body_that_stalls_or_drips_is_given_up(
    limit: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After signed headers: also as many as are read at once, which others wait for."""
    monkeypatch.setattr(app, "_CHUNK_SECONDS", 0.05 if limit == "_CHUNK_SECONDS" else 1.0)
    monkeypatch.setattr(app, "_LEAST_RATE", 1 << 30)
    port, client = served.port, served.client
    body = pack({"site": 0, "boxes": []}, bytes(1000))
    with ExitStack() as stack:
        raws = []
        for _ in range(2 * app.BODIES_AT_ONCE):
            # A session for each: the server may read them in another order.
            sender = ServerClient(f"http://127.0.0.1:{port}", TOKEN)
            ask(sender, "wait", base=-1, seconds=0.0)
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            raw.sendall(signed(sender, "upload", body) + body[:-20])
            raws.append(raw)
        for raw in raws:
            reply = b"-"
            while reply:
                if limit == "_LEAST_RATE":
                    with suppress(OSError):
                        raw.send(body[-20:-19])
                    raw.settimeout(0.1)
                with suppress(TimeoutError):
                    reply = received(raw)
        assert ask(client, "join", **JOIN)[0]["uploads"]


def received(raw: socket.socket) -> bytes:
    with suppress(ConnectionError):
        reply = raw.recv(1 << 16)
        assert not reply or reply.startswith(b"HTTP/1.1 400"), reply
        return reply
    return b""


def test_a_tls_handshake_has_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    port = free_port()
    certificate, key = own_certificate(tmp_path)
    with serving(tmp_path / "state", [], port, (certificate, key)):
        for start in (b"", b"\x16\x03\x01\x02\x00\x01\x00"):  # of a hello that does not end
            assert answer(port, start) == b""
        client = ServerClient(f"https://127.0.0.1:{port}", TOKEN, certificate)
        assert ask(client, "wait", base=-1, seconds=0.0)[0]["number"] == 0


def test_wide_and_deep_json_is_refused_before_it_is_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 MiB of empty lists and 200,000 levels, of strangers and of a site; decoded, the lists take
    256 MiB."""
    decoded: list[int] = []
    decode = json.loads

    def counting(text: bytes, **options: Any) -> Any:
        decoded.append(len(text))
        return decode(text, **options)

    def packed(text: bytes) -> bytes:
        start = struct.pack("<4sIQ", b"BTO2", len(text), xxhash.xxh3_64_intdigest(text))
        return start + text

    wide = packed(b'{"a": [' + b"[]," * (4 << 20) + b"[]]}")
    deep = packed(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    port, client = served.port, served.client
    monkeypatch.setattr(protocol.json, "loads", counting)
    tracemalloc.start()
    for action in ("join", "contribute"):
        for body in (wide, deep):
            reply = answer(port, unsigned(action, len(body), body))
            assert reply.startswith(b"HTTP/1.1 401") or not reply
    many = packed(b'{"a": [' + b"[]," * 2_700_000 + b"[]]}")  # as long as a join may be
    for action in ("join", "contribute", "weights"):
        assert answer(port, signed(client, action, many) + many).startswith(b"HTTP/1.1 400")
    for action in ("put", "layout"):  # whose payload may be large, and not its header
        long = packed(b'{"a": "' + b"a" * 66_000 + b'"}')
        assert answer(port, signed(client, action, long) + long).startswith(b"HTTP/1.1 400")
    for action, status in (("join", b"413"), ("wait", b"413"), ("contribute", b"400")):
        reply = answer(port, signed(client, action, wide) + wide)
        assert reply.startswith(b"HTTP/1.1 " + status) or (not reply and status == b"413")
    assert not decoded
    assert answer(port, signed(client, "join", deep) + deep).startswith(b"HTTP/1.1 400")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ask(client, "join", **JOIN)[0]["uploads"]
    assert decoded[0] == len(deep) - 16
    assert most < 96 << 20  # with what this test sends


def test_the_end_of_a_process_is_noticed_by_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by heartbeats that are missing, nor by the window."""
    monkeypatch.setattr(members, "HEARTBEAT_TIMEOUT", 1000.0)
    monkeypatch.setattr(members, "RECONNECT_SECONDS", 0.5)
    with outer_server(tmp_path, window_seconds=1000.0) as reach:
        clients = [ServerClient(reach["server"], OWN_TOKEN) for _ in range(2)]
        request = JOIN | {"sites": JOIN["sites"] | {"count": 2}}
        for site, client in enumerate(clients):
            ask(client, "join", **(request | {"site": site, "run": f"{site:016x}"}))
        boxes = [["w", [0], [4]]]
        part = {"attempt": "0" * 16, "rank": 0, "part": 0, "boxes": boxes}
        ask(clients[0], "upload", site=0, boxes=boxes, payload=bytes(16))
        ask(clients[0], "uploaded", site=0)
        ask(clients[0], "contribute", site=0, **part, payload=bytes(16))
        ask(clients[0], "deliver", **DELIVERY)
        ask(clients[1], "heartbeat", site=1, run=f"{1:016x}")  # one that ends as it should
        assert ask(clients[0], "wait", base=0, seconds=1.0)[0]["number"] == 0
        body = pack({"site": 1, "run": f"{1:016x}"})
        port = int(reach["server"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.sendall(signed(clients[1], "heartbeat", body, OWN_TOKEN) + body)
        while ask(clients[0], "wait", base=0, seconds=10.0)[0]["number"] == 0:
            pass
        assert ask(clients[0], "wait", base=0, seconds=0.0)[0]["sites"] == [0]


def test_memory_under_a_thousand_hostile_connections_is_as_documented(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/howto/sites.md: 64 MiB at most, however many they are; from 16 hosts here."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 1000.0)
    port, client = served.port, served.client
    start = b"POST /join HTTP/1.1\r\nHost: x\r\n"
    kinds = [
        start + b"A: " + b"a" * (MOST_HEADERS - 100),
        unsigned("contribute", 16 << 20, bytes(1 << 16)),
        start + b"Transfer-Encoding: chunked\r\n\r\n10000\r\n" + bytes(60_000),
        b"P",
    ]
    with ExitStack() as stack:
        before = most = psutil.Process().memory_info().rss
        for number in range(1000):
            raw = stack.enter_context(socket.socket())
            raw.bind((f"127.0.1.{1 + number % 16}", 0))
            raw.connect(("127.0.0.1", port))
            with suppress(ConnectionError):
                raw.sendall(kinds[number % 4])
            if number % 50 == 0:
                assert ask(client, "wait", base=0, seconds=0)[0]["number"] == 0
                most = max(most, psutil.Process().memory_info().rss)
        assert ask(client, "join", **JOIN)[0]["uploads"]
        most = max(most, psutil.Process().memory_info().rss)
    assert most - before < 64 << 20
    assert MOST_STRANGERS < 1000
