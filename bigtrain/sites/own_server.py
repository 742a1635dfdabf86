"""Start of an outer server by site 0 (`sites.start_server`)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bigtrain
from bigtrain.errors import LaunchError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.client import (
    RefusedByServerError,
    ServerClient,
    UnreachableError,
    read_token,
)
from bigtrain.system.listening import exposure, own_address

_LONGEST_WINDOW_SECONDS = 300.0
_ANSWER_SECONDS = 2.0
_START_SECONDS = 120.0
LOG = "server.log"


def start_own_server(sites: SitesSection, directory: Path) -> str:
    """Start the outer server of `sites` as a process that outlives this process and ends when all
    sites have left, unless a server answers at its address already. Return a line for the log.

    Raises LaunchError with the end of the server's log if it cannot be started.
    """
    assert sites.server is not None
    client = ServerClient(sites.server, read_token(Path(sites.token_file or "")))
    if _answers(client):
        return f"the outer server at {sites.server} is running already"
    # Start it.
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / LOG
    host, port = sites.server_place
    address = own_address(host)
    window = min(_LONGEST_WINDOW_SECONDS, sites.timeout_seconds / 2)
    pid = _start_detached(
        [
            *(sys.executable, "-m", "bigtrain.cli", "outer-server", "--until-left"),
            *("--directory", str(directory), "--token-file", str(sites.token_file)),
            *("--host", address, "--port", str(port), "--window-seconds", f"{window:g}"),
        ],
        log,
    )
    # Wait until it answers.
    end = time.monotonic() + _START_SECONDS
    while not _answers(client):
        if not _exists(pid) or time.monotonic() > end:
            last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise LaunchError(
                f"sites.start_server: the outer server at {sites.server} did not start: "
                f"{last_line} -> see {log}; end what uses its port, or choose another one on all "
                "sites"
            )
    reached_from = exposure(address)
    unencrypted = f"; it listens {reached_from}, without encryption" if reached_from else ""
    return f"started the outer server at {sites.server}, log {log}{unencrypted}"


def _start_detached(command: Sequence[str], log: Path) -> int:
    """Start a process in a new session, and not as a child of this process; return the process id.
    Signals to this process's group, and a launcher that ends all descendants, do not reach it."""
    root = str(Path(bigtrain.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    script = '"$@" >> "$0" 2>&1 < /dev/null & echo $!'  # $0: the log, $@: the command
    started = subprocess.run(
        ["/bin/sh", "-c", script, str(log), *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return int(started.stdout)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _answers(client: ServerClient) -> bool:
    """Return whether a server with this token answers. Raises LaunchError for another token."""
    try:
        client.ask("hello", {}, deadline=time.monotonic() + _ANSWER_SECONDS)
    except UnreachableError:
        return False
    except RefusedByServerError as error:
        raise LaunchError(
            f"sites.server = {client.address} is an outer server with a different token ({error}) "
            "-> the token_file it was started with, or another port"
        ) from error
    return True
