"""What changed since the check last ran on a GPU. Whoever runs it again writes the new run here,
and takes out what it has shown; the parts named here come first, unchanged ones after the speed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LastRun:
    """A run of the check on a GPU. commit: whose code it ran."""

    commit: str
    date: str
    device: str


LAST_RUN = LastRun("305f1715", "2026-11-26", "NVIDIA H100 80GB HBM3")
CHANGED: dict[str, str] = {
    "parity-bf16": "ZeRO 1 and 2 clip, update and write the parameters in one compiled kernel; "
    "the first gradient of a step is written over the sum of the last one",
    "compilation": "layers are compiled by default, under ZeRO 3 as pieces between its gathers",
    "losses": "Liger's layers are chosen by default where layers are not compiled",
}
"""Parts on numbers by what changed since `LAST_RUN` of what they compare."""
