"""Measurements of ``bigtrain plan --calibrate``: the file for ``--hardware``, and a copy in the
user's cache, from which runs on this machine's CPUs are predicted. Pure."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.planner.tables.engines import MeasuredEngine, measured_engine
from bigtrain.planner.tables.hardware import Device, Reach
from bigtrain.system.user_cache import cache_get, cache_put, key_of, package_fingerprints, processor

KIND = "calibration"
_NOT_ONE = (OSError, ValueError, KeyError, TypeError)


def write_calibration(device: Device, engine: MeasuredEngine | None, path: Path) -> None:
    """Write the measurements of `device` and, on CPUs, of the engine. Raises OSError."""
    path.write_text(json.dumps(_tree(device, engine), indent=1) + "\n", encoding="utf-8")


def load_calibration(path: Path) -> tuple[Device, MeasuredEngine | None]:
    """Read a file of `write_calibration`. Raises ConfigError."""
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")))
    except _NOT_ONE as error:
        raise ConfigError(
            Problem(
                "--hardware",
                str(path),
                f"is not a calibration ({error!r})",
                "write one with bigtrain plan --calibrate",
            )
        ) from error


def keep_calibration(device: Device, engine: MeasuredEngine | None) -> None:
    """Store the measurements of this machine's CPUs in the user's cache."""
    cache_put(KIND, _machine(), _tree(device, engine))


def kept_calibration() -> tuple[Device, MeasuredEngine | None] | None:
    """Return the last measurements of this machine's CPUs; None if there are none."""
    tree = cache_get(KIND, _machine())
    if tree is not None:
        with suppress(*_NOT_ONE):
            return _read(tree)
    return None


def _machine() -> str:
    """Return the key of what a measurement depends on: the machine, and the libraries on it."""
    libraries = "editable"
    with suppress(LookupError):
        libraries = package_fingerprints("torch", "deepspeed")
    return key_of([platform.node(), processor(), str(os.cpu_count()), libraries])


def _tree(device: Device, engine: MeasuredEngine | None) -> dict[str, Any]:
    return {"device": asdict(device), "engine": None if engine is None else asdict(engine)}


def _read(tree: dict[str, Any]) -> tuple[Device, MeasuredEngine | None]:
    device = Device(**{**tree["device"], "reach": Reach(**tree["device"]["reach"])})
    return device, None if tree["engine"] is None else measured_engine(tree["engine"])
