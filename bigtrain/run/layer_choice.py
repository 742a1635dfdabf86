"""How the layers of a run on CUDA compute, for its log, and what an earlier launch had instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigtrain.models.layers.kernels import fast_path_of
from bigtrain.settings.fast_path import FastPath
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
    before = _of_earlier_launch(Path(run.config.output.directory))
    if before is not None and before != path.words:
        lines.append(
            f"layers were {before} in the launch before: rounding differs from here on; "
            f"model.compile={'on' if 'compiled' in before else 'off'} and "
            f"model.kernels={'liger' if 'Liger' in before else 'none'} keep it"
        )
    return lines


def _of_earlier_launch(directory: Path) -> str | None:
    """Return how the layers of the launch before computed; None if there was none. Launches of
    releases that chose nothing recorded only their settings."""
    if not any((directory / "checkpoints").glob("step-*")):
        return None
    with suppress(OSError, ValueError):
        environment = _json(directory / "environment.json")
        if KEY in environment:
            return str(environment[KEY])
        section = _json(directory / "config.json").get("model", {})
        return FastPath(
            "liger" if section.get("kernels") == "liger" else "none", section.get("compile") == "on"
        ).words
    return None


def _json(path: Path) -> Mapping[str, Any]:
    tree: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return tree
