"""`starts.jsonl`: from where each start of a run went on, and when; nothing of it is taken back.

One JSON object per line::

    {"generation", "time", "step", "samples", "world_size"}

"generation": of the run directory, as in ``generations/`` (None where nobody holds it); "time":
when training began, UTC; "step", "samples": what the run stood at then, 0 at its beginning.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

FILE = "starts.jsonl"


def note_start(
    directory: Path, *, generation: int | None, step: int, samples: int, world_size: int
) -> None:
    """Append a line. For the main rank only; a kill cuts off that line at worst, which the next
    start then ends. Raises OSError."""
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
