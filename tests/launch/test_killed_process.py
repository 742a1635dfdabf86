"""A process that is stopped under a launcher: nobody waits for it for ever."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.launch.conftest import Inputs, launcher, start, wait

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def process_of(run: Path, rank: int) -> int:
    """The process id of a rank of the run, by its environment."""
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and f"directory={run}".encode() in command:
            return int(entry.name)
    raise AssertionError(f"no process of rank {rank}")


def test_the_others_end(inputs: Inputs, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--config", inputs.run_yaml, f"output.directory={run}", "train.steps=1000000"]
    words += ["evaluation.every_steps=1000000", "watchdog.timeout_seconds=5"]
    process = start([*launcher("torchrun"), *words], home)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "step 5/" in line:
            os.kill(process_of(run, 1), signal.SIGSTOP)
            break
    finished = wait(process)
    output = "".join(seen) + finished.output
    assert finished.code != 0, output
    named = rf"lagging:\n  rank 1 on {re.escape(socket.gethostname())} does not respond"
    assert re.search(named, output), output
