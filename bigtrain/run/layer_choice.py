"""How the layers of a run on CUDA compute, for its log, and what an earlier launch had instead."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigtrain.models.layers.kernels import fast_path_of
from bigtrain.settings.resolve import ResolvedRun

KEY = "layers"
"""Of ``environment.json``."""


def layer_lines(run: ResolvedRun, hf_config: Any, device_type: str) -> list[str]:
    """Return lines on how the layers of `run` compute; none on a CPU, where nothing is chosen. A
    line names the change if an earlier launch of the run computed them otherwise: the numbers agree
    up to rounding."""
    if device_type != "cuda":
        return []
    path = fast_path_of(run.config, run.engine, hf_config, device_type)
    lines = [path.line()]
    directory = Path(run.config.output.directory)
    if any((directory / "checkpoints").glob("step-*")):
        with suppress(OSError, ValueError, KeyError):
            before = json.loads((directory / "environment.json").read_text(encoding="utf-8"))[KEY]
            if before != path.words:
                lines.append(
                    f"layers were {before} in the launch before: rounding differs from here on; "
                    f"model.compile={'on' if 'compiled' in before else 'off'} and "
                    f"model.kernels={'liger' if 'Liger' in before else 'none'} keep it"
                )
    return lines
