"""An outer server over HTTP: who is answered, and what is refused and named in its log."""

from __future__ import annotations

import http.client
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from bigtrain.engine.sites.boxes import Box, split_cuts
from bigtrain.engine.sites.codecs import CODECS
from bigtrain.engine.sites.outer_server.app import OuterServer
from bigtrain.engine.sites.outer_server.client import (
    RefusedByServerError,
    ServerClient,
    UnreachableError,
    read_token,
)
from bigtrain.engine.sites.outer_server.ledger import Ledger, Rules
from bigtrain.engine.sites.outer_server.messages import (
    MOST_BYTES,
    CorruptMessageError,
    pack,
    unpack,
)
from bigtrain.engine.sites.outer_server.storage import Storage
from bigtrain.errors import LaunchError
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


@contextmanager
def serving(
    directory: Path, said: list[str], port: int, certificate: tuple[Path, Path] | None = None
) -> Iterator[None]:
    ledger = Ledger(Storage(directory), Rules(False, 1000.0), said.append)
    application = OuterServer(ledger, TOKEN, said.append).application()
    files = certificate or (None, None)
    config = uvicorn.Config(
        application,
        host="127.0.0.1",
        port=port,
        log_level="error",
        lifespan="off",
        ssl_certfile=files[0],
        ssl_keyfile=files[1],
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(20)


def ask(client: ServerClient, action: str, limit: float = 10.0, **header: Any) -> Any:
    payload = header.pop("payload", b"")
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
        attempt = "0" * 16
        header = {"site": 0, "attempt": attempt, "rank": 0, "part": 0, "boxes": boxes}

        def damage(action: str, body: bytes, headers: dict[str, str]) -> bytes:
            return body[:-1] + bytes([body[-1] ^ 4]) if next(damaged, False) else body

        with on_the_wire(damage):
            ask(client, "contribute", **header, payload=(weights + 1).numpy().tobytes())
        assert any("refused a corrupted message (contribute): checksum" in text for text in said)
        delivery = {"attempt": attempt, "base": 0, "step": 5, "tokens": 10, "num_messages": 1}
        state, _ = ask(client, "deliver", site=0, **delivery)
        assert (state["number"], state["sites"]) == (1, [0])
        told = {(event["event"], event["reason"], event["count"]) for event in state["events"]}
        assert told >= {("message_refused", "corrupted", 1)}
        assert ("forged", "127.0.0.1") in {(e["reason"], e["who"]) for e in state["events"]}
        _, payload = ask(client, "weights", site=0, number=1, form="full", boxes=boxes)
        found = split_cuts(CODECS["float32"], payload, [(Box("w", (0,), (4,)), (4,))])
        assert torch.equal(found, weights + 1)
        with pytest.raises(RefusedByServerError, match="outer step 1 was made meanwhile"):
            ask(client, "weights", site=0, number=0, form="full", boxes=boxes)
        with pytest.raises(RefusedByServerError, match="no action 'dance'"):
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
    found = response.status, response.read()
    connection.close()
    return found


def test_a_message_that_is_sent_again_and_one_that_is_too_large(tmp_path: Path) -> None:
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
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            length = MOST_BYTES + 1
            raw.sendall(
                f"POST /join HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
            )
            assert raw.recv(100).startswith(b"HTTP/1.1 413")
        assert any("refused a message of more than" in text for text in said)


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", certificate),
        ],
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("no openssl here to make a certificate")
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
