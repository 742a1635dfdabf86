"""The file that ``bigtrain plan --calibrate`` writes and ``--hardware`` reads. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.planner.tables.engines import MeasuredEngine, ZeroCosts
from bigtrain.planner.tables.hardware import Device, Reach


def write_calibration(device: Device, engine: MeasuredEngine | None, path: Path) -> None:
    """Write what was measured of `device` and, on CPUs, of the engine. Raises OSError."""
    tree = {"device": asdict(device), "engine": None if engine is None else asdict(engine)}
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def load_calibration(path: Path) -> tuple[Device, MeasuredEngine | None]:
    """What `write_calibration` wrote. Raises ConfigError."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        device = Device(**{**tree["device"], "reach": Reach(**tree["device"]["reach"])})
        return device, _engine(tree["engine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            Problem(
                "--hardware",
                str(path),
                f"is no calibration ({error!r})",
                "write one with bigtrain plan --calibrate",
            )
        ) from error


def _engine(tree: Mapping[str, Any] | None) -> MeasuredEngine | None:
    if tree is None:
        return None
    zero = {int(stage): ZeroCosts(**costs) for stage, costs in tree["zero"].items()}
    return MeasuredEngine(**{**tree, "zero": zero})
