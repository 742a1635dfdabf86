"""An outer server over HTTP: who is answered, and what is refused and named in its log."""

from __future__ import annotations

import errno
import http.client
import json
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from bigtrain.errors import LaunchError
from bigtrain.sites.client import (
    RefusedByServerError,
    ServerClient,
    UnreachableError,
    read_token,
)
from bigtrain.sites.codecs import CODECS
from bigtrain.sites.protocol import (
    MOST_HEADER_BYTES,
    REQUESTS,
    CorruptMessageError,
    RefusedError,
    digest_of,
    pack,
    parse_request,
    request_signature,
    unpack,
)
from bigtrain.sites.rectangles import ParameterBox, decode_rectangles
from bigtrain.sites.server.app import HTTPServer, OuterServer, Place, _SignedHeaders
from bigtrain.sites.server.members import Rules
from bigtrain.sites.server.state import OuterServerState
from bigtrain.sites.server.store import ServerDirectory
from tests.support.worlds import free_port

TOKEN = b"0123456789abcdef"
JOIN: dict[str, Any] = {
    "site": 0,
    "facts": {"data": "x"},
    "sites": {
        "count": 1,
        "inner_steps": 5,
        "outer": {"type": "average", "lr": None, "momentum": None},
        "codec": "float32",
    },
    "parameters": [["w", [4]]],
}
DELIVERY: dict[str, Any] = {
    **{"attempt": "0" * 16, "base": 0, "step": 5, "last_step": 9},
    **{"tokens": 10, "num_messages": 1},
}


@contextmanager
def serving(
    directory: Path, said: list[str], port: int, certificate: tuple[Path, Path] | None = None
) -> Iterator[HTTPServer]:
    store = ServerDirectory(directory)
    state = OuterServerState(store, Rules(False, 1000.0), said.append)
    server_ = OuterServer(state, TOKEN, said.append)
    server = HTTPServer(server_, Place("127.0.0.1", port, *(certificate or (None, None))))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        store.close()


@dataclass
class Served:
    """A running server: where, who asks it, and what it has logged."""

    port: int
    client: ServerClient
    said: list[str]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """An outer server of a run that site 0 has joined."""
    port, said = free_port(), list[str]()
    client = ServerClient(f"http://127.0.0.1:{port}", TOKEN)
    with serving(tmp_path / "state", said, port):
        assert ask(client, "join", **JOIN)[0]["uploads"]
        yield Served(port, client, said)


def run_of(site: int) -> str:
    """Return the id of a site's run directory."""
    return f"{site:016x}"


def ask(client: ServerClient, action: str, limit: float = 10.0, **header: Any) -> Any:
    payload = header.pop("payload", b"")
    if action != "hello":
        header = {"site": 0, **header}
        header = {"run": run_of(header["site"]), **header}
    return client.ask(action, header, payload, deadline=time.monotonic() + limit)


def test_a_message_comes_as_it_was_sent_or_not_at_all() -> None:
    body = pack({"a": [1, "x"]}, b"\0\1\2")
    header, payload = unpack(body)
    assert (header, bytes(payload)) == ({"a": [1, "x"]}, b"\0\1\2")
    for position in range(len(body)):
        damaged = bytearray(body)
        damaged[position] ^= 1
        with pytest.raises(CorruptMessageError):
            unpack(bytes(damaged))
    for short in (b"", body[:7], body[:-1]):
        with pytest.raises(CorruptMessageError):
            unpack(short)


def test_a_run_over_http_and_what_is_refused_on_the_way(tmp_path: Path) -> None:
    said: list[str] = []
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    client = ServerClient(address, TOKEN)
    with serving(tmp_path, said, port):
        state, _ = ask(client, "join", **JOIN)
        assert state["uploads"] is True
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
        boxes = [["w", [0], [4]]]
        ask(client, "upload", site=0, boxes=boxes, payload=weights.numpy().tobytes())
        ask(client, "uploaded", site=0)
        # Whoever has another token is told nothing, and neither is who believes another server.
        stranger = ServerClient(address, b"fedcba9876543210")
        with pytest.raises(RefusedByServerError, match=r"not signed with sites\.token_file"):
            ask(stranger, "join", **JOIN)
        assert "127.0.0.1: refused a message (hello) that nobody signed who has the token" in said
        # A bit that turns on the way: named, and sent again.
        damaged = iter([True])
        header = {"attempt": DELIVERY["attempt"], "rank": 0, "part": 0, "boxes": boxes}

        def damage(action: str, body: bytes, headers: dict[str, str]) -> bytes:
            return body[:-1] + bytes([body[-1] ^ 4]) if next(damaged, False) else body

        with on_the_wire(damage):
            ask(client, "contribute", **header, payload=(weights + 1).numpy().tobytes())
        assert any("refused a corrupted message (contribute): checksum" in text for text in said)
        state, _ = ask(client, "deliver", **DELIVERY)
        assert (state["number"], state["sites"]) == (1, [0])
        told = {(event["event"], event["reason"], event["count"]) for event in state["events"]}
        assert told >= {("message_refused", "corrupted", 1)}
        assert ("forged", "127.0.0.1") in {(e["reason"], e["who"]) for e in state["events"]}
        _, payload = ask(client, "weights", site=0, number=1, form="full", boxes=boxes)
        values = decode_rectangles(
            CODECS["float32"], payload, [(ParameterBox((0,), (4,), "w"), (4,))]
        )
        assert torch.equal(values, weights + 1)
        with pytest.raises(RefusedByServerError, match="outer step 1 was made meanwhile"):
            ask(client, "weights", site=0, number=0, form="full", boxes=boxes)
        with pytest.raises(RefusedByServerError, match="unknown action 'dance'"):
            ask(client, "dance", site=0)
    with pytest.raises(UnreachableError, match=r"did not answer in time \(ConnectionRefusedError"):
        ask(client, "wait", 0.5, base=0, seconds=1)
    with serving(tmp_path, said, port):  # another start of it: the client says hello again
        assert ask(client, "wait", base=0, seconds=1)[0]["number"] == 1


Change = Callable[[str, bytes, dict[str, str]], bytes]


@contextmanager
def on_the_wire(change: Change) -> Iterator[None]:
    """Inside, `change` gets each request (action, body, headers) and says which body travels."""
    plain = http.client.HTTPConnection.request

    def request(self: Any, method: str, url: str, body: bytes, headers: dict[str, str]) -> None:
        plain(self, method, url, change(url[1:], body, headers), headers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http.client.HTTPConnection, "request", request)
        yield


def post(port: int, action: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", f"/{action}", body, headers)
    response = connection.getresponse()
    status_and_body = response.status, response.read()
    connection.close()
    return status_and_body


def test_a_message_that_is_sent_again_is_never_accepted(tmp_path: Path) -> None:
    said: list[str] = []
    port = free_port()
    client = ServerClient(f"http://127.0.0.1:{port}", TOKEN)
    seen: list[tuple[str, bytes, dict[str, str]]] = []
    with serving(tmp_path, said, port):

        def see(action: str, body: bytes, headers: dict[str, str]) -> bytes:
            seen.append((action, body, headers))
            return body

        with on_the_wire(see):
            ask(client, "join", **JOIN)
            ask(client, "leave", site=0)
        action, body, headers = seen[-1]
        assert action == "leave"
        status, _ = post(port, action, body, headers)
        assert status == 401
        assert "127.0.0.1: refused a message (leave) that was sent before" in said
        # Its signature fits nothing else.
        assert post(port, "join", body, headers)[0] == 401
    # Never, however many messages later, and not at another start of the server.
    server = OuterServer(
        OuterServerState(ServerDirectory(tmp_path), Rules(False, 1.0), said.append), TOKEN, print
    )

    def status(headers: Any) -> int | None:
        refusal = server._refusal_by_headers("host", headers)
        return None if refusal is None else refusal[0]

    session = server._greet("0" * 32)["session"]
    assert server._greet("0" * 32)["session"] == session  # no new one for an old message
    first = signed_headers(server, f"{session}-1")
    assert status(first) is None
    for sequence in range(2, 100_002):
        server._last[session] = sequence
    assert status(first) == 401
    assert status(signed_headers(server, f"{session}-100002")) is None
    assert status(signed_headers(server, f"{session}-100002")) == 401
    assert status(signed_headers(server, f"{'0' * 16}-1")) == 412
    assert status(replace(signed_headers(server, f"{session}-200000"), length=3)) == 401


def signed_headers(server: OuterServer, nonce: str) -> _SignedHeaders:
    """The headers of a message without a body."""
    instance, digest = server._instance, digest_of(b"")
    signature = request_signature(TOKEN, "leave", instance, nonce, 0, digest)
    return _SignedHeaders("leave", instance, nonce, 0, digest, signature)


def own_certificate(directory: Path) -> tuple[Path, Path]:
    """And its key; skips the test where nothing can make them."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: make test-deps")
    certificate, key = directory / "c.pem", directory / "k.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "2"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", certificate),
        ],
        capture_output=True,
        check=True,
    )
    return certificate, key


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    certificate, key = own_certificate(tmp_path)
    port = free_port()
    with serving(tmp_path / "state", [], port, (certificate, key)):
        address = f"https://127.0.0.1:{port}"
        assert ask(ServerClient(address, TOKEN, certificate), "join", **JOIN)[0]["uploads"]
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(ServerClient(address, TOKEN), "join", 0.5, **JOIN)


def test_tokens_that_can_be_guessed(tmp_path: Path) -> None:
    short = tmp_path / "token"
    short.write_text(" secret \n")
    with pytest.raises(LaunchError, match="a token of 6 bytes, which can be guessed"):
        read_token(short)
    with pytest.raises(LaunchError, match="cannot be read"):
        read_token(tmp_path / "none")


def unsigned(action: str, length: int, start: bytes = b"") -> bytes:
    return (
        f"POST /{action} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + start
    )


def answer(port: int, request: bytes) -> bytes:
    """What comes until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        reply = b""
        try:
            raw.sendall(request)
            while chunk := raw.recv(1 << 16):
                reply += chunk
        except ConnectionError:  # it does not read what was refused
            pass
        return reply


def test_what_comes_from_outside_is_escaped_in_the_log(served: Served) -> None:
    answer(served.port, unsigned("x%0a12:00:00%20outer%20step%209%1b[2J%e2%80%ae", 0))
    ask(served.client, "leave", site=0, reason="done\n12:00:00 outer step 9\x1b[2J")
    assert all(line.isprintable() for line in served.said), served.said
    text = "(x\\n12:00:00 outer step 9\\x1b[2J\\u202e)"
    assert any(text in line for line in served.said)


OUT_OF_RANGE: list[tuple[str, dict[str, Any], str]] = [
    ("join", {"site": 999}, r"sites.index = 999: sites.count = 1 has 0 to 0"),
    ("join", {"site": 10**30}, "site = 1000"),
    ("join", {"facts": {"data": "y"}}, "data: 'x' there, 'y' here"),
    ("join", {"parameters": [["w", [4]], ["v", [9]]]}, "parameters: "),
    ("join", {"parameters": [["w", [4]], ["v", [10**18]]]}, "not the name and shape"),
    ("join", {"parameters": [["w", "4"]]}, "not the name and shape"),
    ("join", {"parameters": [[]] * 100_001}, "at most 100000 items"),
    ("join", {"more": 1}, "more = 1: Extra inputs"),
    ("deliver", {"tokens": 10**30}, "tokens = 1000"),
    ("deliver", {"tokens": 0}, "tokens = 0"),
    ("deliver", {"step": 10**12}, "step = 1000"),
    ("deliver", {"step": -1}, "step = -1"),
    ("deliver", {"num_messages": 0}, "num_messages = 0"),
    ("deliver", {"base": -1}, "base = -1"),
    ("deliver", {"base": 10**400}, "base = 1000"),
    ("deliver", {"site": 2}, "sites.count = 1"),
    ("deliver", {"attempt": "../../../x"}, "attempt = "),
    ("wait", {"base": True}, "base = True"),
    ("wait", {"seconds": 1e9}, "seconds = 1000000000"),
    ("leave", {"reason": "x" * 501}, "reason = "),
    ("leave", {"site": 2}, "sites.count = 1"),
    ("upload", {"boxes": [[[["w"]]]], "payload": b"1234"}, "no rectangle of a parameter"),
    ("upload", {"boxes": []}, "0 bytes are not float32 values"),
]


def test_fields_out_of_range_are_refused_and_named(served: Served) -> None:
    good = {"join": JOIN, "deliver": DELIVERY, "wait": {"base": 0, "seconds": 0}}
    for action, fields, reason in OUT_OF_RANGE:
        served.said.clear()
        with pytest.raises(RefusedByServerError) as error:
            ask(served.client, action, **{"site": 0, **good.get(action, {}), **fields})
        assert reason in str(error.value)
        lines = [line for line in served.said if f"refused {action} of" in line]
        assert any(reason in line for line in lines), (action, fields, served.said)


@pytest.mark.parametrize("action", sorted(REQUESTS.keys() - {"hello"}))
def test_every_request_of_a_site_names_its_run(action: str) -> None:
    """Without it, a second run with the same index could not be told from the first."""
    for header in ({"site": 0}, {"site": 0, "run": ""}):
        with pytest.raises(RefusedError) as error:
            parse_request(action, header)
        assert "run = " in str(error.value)


def test_a_site_that_joins_with_many_parameters_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are allocated without the lock, and the run's description is decoded once."""
    state = OuterServerState(ServerDirectory(tmp_path), Rules(False, 1000.0), print)
    allocate, is_free = OuterServerState._build, []

    def build(self: OuterServerState, run: dict[str, Any]) -> Any:
        def take() -> None:
            is_free.append(self.changed.acquire(timeout=5))
            if is_free[-1]:
                self.changed.release()

        probe = threading.Thread(target=take)
        probe.start()
        probe.join()
        return allocate(self, run)

    monkeypatch.setattr(OuterServerState, "_build", build)
    request = parse_request("join", {**JOIN, "run": run_of(0)})
    state.act("join", request, memoryview(b""))
    assert is_free == [True]
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", lambda text: pytest.fail("decoded again"))
        heartbeat = parse_request("heartbeat", {"site": 0, "run": run_of(0)})
        state.act("heartbeat", heartbeat, memoryview(b""))
        assert state.member(0, run_of(0)).is_active


def test_numbers_that_are_not_finite_and_deep_json_of_a_site_are_no_message() -> None:
    for text in (
        b'{"a": 1e999}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'"text"',
        b"\xff",
    ):
        body = packed(text)
        with pytest.raises(CorruptMessageError, match="header"):
            unpack(body)
    with pytest.raises(CorruptMessageError, match="a header of"):
        unpack(packed(b" " * (MOST_HEADER_BYTES + 1)))


def packed(text: bytes) -> bytes:
    return struct.pack("<4sIQ", b"BTO2", len(text), xxhash.xxh3_64_intdigest(text)) + text


def test_a_second_run_with_the_same_index_is_refused_while_the_first_takes_part(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    port = free_port()
    first, second = "a" * 16, "b" * 16
    client = ServerClient(f"http://127.0.0.1:{port}", TOKEN)
    with serving(tmp_path, said, port):
        ask(client, "join", **JOIN, run=first)
        ask(client, "join", **JOIN, run=first)  # started again
    with serving(tmp_path, said, port):  # a restart of the server does not matter
        with pytest.raises(RefusedByServerError, match=r"run a{16}\) takes part as this site"):
            ask(client, "join", **JOIN, run=second)
        for action, fields in (
            ("leave", {}),
            ("deliver", DELIVERY),
        ):
            with pytest.raises(RefusedByServerError, match=r"run a{16}\)"):
                ask(client, action, site=0, run=second, **fields)
        assert any("refused join of site 0: sites.index = 0: another run" in t for t in said)
        ask(client, "leave", site=0, run=first)
        ask(client, "join", **JOIN, run=second)
        with pytest.raises(RefusedByServerError, match=r"run b{16}\) takes part"):
            ask(client, "join", **JOIN, run=first)
        ask(client, "join", **JOIN, run=first, allowed=["sites.index"])


def test_a_full_disk_is_tried_again_by_the_site(tmp_path: Path) -> None:
    said: list[str] = []
    port = free_port()
    client = ServerClient(f"http://127.0.0.1:{port}", TOKEN)
    full = iter([True])
    write = ServerDirectory.write_run

    def write_run(self: ServerDirectory, tree: Any) -> None:
        if next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, tree)

    with pytest.MonkeyPatch.context() as patch, serving(tmp_path, said, port):
        patch.setattr(ServerDirectory, "write_run", write_run)
        assert ask(client, "join", **JOIN)[0]["uploads"]
    assert (
        sum("join could not be done yet, and the site asks again: [Errno 28]" in t for t in said)
        == 1
    )
