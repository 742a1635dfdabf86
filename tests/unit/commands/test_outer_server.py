"""`bigtrain outer-server` as site 0 starts it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bigtrain.commands import outer_server
from bigtrain.sites.client import ServerClient, UnreachableError
from bigtrain.sites.server import app
from tests.support.worlds import free_port

TOKEN = "0123456789abcdef"


def started(directory: Path) -> tuple[threading.Thread, list[int], ServerClient]:
    """The command with --until-left in a thread, and its exit code once it has ended."""
    token = directory / "token"
    token.write_text(TOKEN)
    port = free_port()
    arguments = outer_server.OuterServerArguments(
        directory=directory / "state", token_file=token, port=port, until_left=True
    )
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(outer_server.run(arguments)))
    thread.start()
    return thread, codes, ServerClient(f"http://127.0.0.1:{port}", TOKEN.encode())


def test_a_server_ends_when_every_site_that_joined_has_left(tmp_path: Path) -> None:
    thread, codes, client = started(tmp_path)
    for site in range(2):
        client.ask(
            "join",
            {
                "site": site,
                "run": f"{site:x}",
                "facts": {},
                "sites": {"count": 2, "inner_steps": 5},
                "parameters": [["w", [4]]],
            },
            deadline=time.monotonic() + 60,
        )
    for site in range(2):
        assert not codes
        client.ask("leave", {"site": site, "run": f"{site:x}"}, deadline=time.monotonic() + 60)
    thread.join(60)
    assert codes == [0]
    with pytest.raises(UnreachableError):
        client.ask("hello", {}, deadline=time.monotonic() + 0.2)


def test_a_server_ends_when_no_site_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "IDLE_SECONDS", 0.3)
    thread, codes, _ = started(tmp_path)
    thread.join(60)
    assert codes == [0]
