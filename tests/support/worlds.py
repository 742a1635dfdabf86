"""Real worlds of gloo processes on this machine, one process group for many cases."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A port that nothing listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_world(world_size: int, command: list[str], timeout_seconds: int = 900) -> str:
    """Run `command` (arguments to Python) in `world_size` processes; returns their joined output.

    Fails with the output if any process does not exit with 0; none is left behind.
    """
    common = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *command],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
            for rank in range(world_size)
        ]
        codes: list[int | str] = []
        try:
            for process in processes:
                codes.append(process.wait(timeout_seconds))
        except subprocess.TimeoutExpired:
            codes.append("timeout")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        output.seek(0)
        text = output.read()
    assert codes == [0] * world_size, f"exit codes {codes}\n{text[-6000:]}"
    return text
