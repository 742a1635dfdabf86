"""The server that site 0 starts: it is found again, outlives who started it, and ends by itself."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest

from bigtrain.errors import LaunchError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.membership import Membership
from bigtrain.sites.own_server import LOG, start_own_server
from tests.support.worlds import free_port


def section(directory: Path, port: int, token: str = "0" * 32) -> SitesSection:
    file = directory / f"token-{token[:4]}"
    file.write_text(token)
    return SitesSection(
        count=1,
        inner_steps=1,
        server=f"http://127.0.0.1:{port}",
        token_file=str(file),
        start_server=True,
        timeout_seconds=60,
    )


@pytest.mark.slow
def test_a_server_is_started_once_and_ends_when_all_have_left(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    port = free_port()
    sites, directory = section(tmp_path, port), tmp_path / "run" / "outer_server"
    assert start_own_server(sites, directory).startswith("started the outer server at")
    (server,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(directory) in (one.info["cmdline"] or [])
    ]
    request.addfinalizer(lambda: server.is_running() and server.kill())
    # Not a descendant, which a launcher would end, nor in a session that gets its signals.
    assert server.pid not in {one.pid for one in psutil.Process().children(recursive=True)}
    assert os.getsid(server.pid) != os.getsid(0)
    assert "is running already" in start_own_server(sites, directory)
    with pytest.raises(LaunchError, match="is an outer server with a different token"):
        start_own_server(section(tmp_path, port, "1" * 32), directory)
    site = Membership(sites, "0" * 16)
    settings = {"count": 1, "inner_steps": 1, "outer": {"type": "average"}, "codec": "float32"}
    site.join({"facts": {}, "sites": settings, "parameters": [["w", [4]]], "is_new": True})
    assert site.leave() == ""
    assert psutil.wait_procs([server], timeout=60)[1] == []
    assert "site 0 left" in (directory / LOG).read_text()


@pytest.mark.slow
def test_a_server_that_cannot_start_is_named_with_its_reason(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(LaunchError, match=r"sites\.start_server: .* did not start: .* -> see"):
            start_own_server(section(tmp_path, taken.getsockname()[1]), tmp_path / "server")
