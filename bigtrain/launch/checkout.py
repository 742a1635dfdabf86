"""Where the files beside the package lie. Pure."""

from __future__ import annotations

from pathlib import Path

import bigtrain


def checkout() -> Path:
    """The folder that holds ``bigtrain/``: the checkout, or site-packages where installed."""
    return Path(bigtrain.__file__).resolve().parents[1]


def slurm_script(name: str) -> Path:
    """``slurm/NAME``: beside the package in a checkout, inside it where installed."""
    installed = checkout() / "bigtrain" / "slurm"
    return (installed if installed.is_dir() else checkout() / "slurm") / name
