"""Local world: all ranks as processes of this machine, without a launcher."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bigtrain.errors import LaunchError
from bigtrain.system.listening import try_port

TIMEOUT_SECONDS = 1800.0
SHOWN_CHARACTERS = 6000
_FIRST_PORT = 10000
_TRIES = 100


def free_port() -> int:
    """Return a port that is currently free.

    It is below the kernel's ephemeral ports, if possible: it takes seconds until the world's store
    listens, and gloo in every rank opens ephemeral ports in the meantime.
    """
    ports = range(_FIRST_PORT, _first_ephemeral_port())
    candidates = random.SystemRandom().sample(ports, min(_TRIES, len(ports)))
    for port in (*candidates, 0):
        with suppress(OSError):  # in use
            return try_port(port)
    raise LaunchError("this machine has no free port")


def _first_ephemeral_port() -> int:
    """Read it from Linux's net.ipv4.ip_local_port_range; elsewhere return IANA's first dynamic
    port."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 49152


def run_local_world(
    world_size: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> str:
    """Run Python with `arguments` as `world_size` ranks; return their combined output.

    `environment` is added to this process's environment. Raises LaunchError with the end of the
    output if any rank does not exit with 0 within `timeout_seconds`; then all are killed.
    """
    common = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]
        # Wait for all ranks, at most `timeout_seconds` for each in turn.
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
    if codes != [0] * world_size:
        end = text[-SHOWN_CHARACTERS:]
        raise LaunchError(f"processes on this machine ended with exit codes {codes}:\n{end}")
    return text
