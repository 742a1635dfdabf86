"""`starts.jsonl`: time and step at which each launch of a run began training. Append-only.

One JSON object per line::

    {"generation", "time", "step", "samples", "world_size"}

"generation": the launch's, as in ``generations/`` (None without a run token); "time": when training
began, UTC; "step", "samples": position at which it began, 0 for a new run.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

FILE = "starts.jsonl"


def note_start(
    directory: Path, *, generation: int | None, step: int, samples: int, world_size: int
) -> None:
    """Append a line. For the main rank only; a kill leaves at worst a partial line, which the next
    launch terminates. Raises OSError."""
    line = {
        "generation": generation,
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "step": step,
        "samples": samples,
        "world_size": world_size,
    }
    path = directory / FILE
    with path.open("a+b") as file:
        end = file.seek(0, 2)
        if end:
            file.seek(end - 1)
        before = b"" if not end or file.read(1) == b"\n" else b"\n"
        file.write(before + json.dumps(line).encode() + b"\n")
