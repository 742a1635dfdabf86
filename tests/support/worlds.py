"""Real worlds of gloo processes on this machine, one process group for many cases."""

from __future__ import annotations

from pathlib import Path

from bigtrain.launchers.local_world import free_port, run_local_world

__all__ = ["ROOT", "free_port", "run_world"]

ROOT = Path(__file__).resolve().parents[2]


def run_world(world_size: int, command: list[str], timeout_seconds: int = 900) -> str:
    """Run `command` (arguments to Python) in `world_size` processes; returns their joined output.

    Fails with the output if any process does not exit with 0; none is left behind.
    """
    return run_local_world(world_size, command, {"PYTHONPATH": str(ROOT)}, timeout_seconds)
