"""Processes that tests start end with the test session, however that ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from tests.support.worlds import ROOT

# A forked child, and a program that replaces another one: what the servers of tests start.
PARENT = """
import json, os, signal
from tests.support.parent_death import die_with_parent

server = os.getpid()
children = []
for kind in ("waits", "execs"):
    ready, said = os.pipe()
    child = os.fork()
    if child == 0:
        die_with_parent(server)
        os.write(said, b"1")
        if kind == "execs":
            os.execvp("sleep", ["sleep", "600"])
        signal.pause()
    os.read(ready, 1)
    children.append(child)
print(json.dumps(children), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_children_of_a_killed_server_end(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:
        assert server.stdout is not None
        children = json.loads(server.stdout.readline())
        handles = [os.pidfd_open(child) for child in children]
        assert select.select(handles, [], [], 0)[0] == []  # they run
        server.send_signal(how)
        for handle in handles:
            assert select.select([handle], [], [], 60)[0] == [handle]
            os.close(handle)
