"""Locations of the files that ship with the package. Pure."""

from __future__ import annotations

from pathlib import Path

import bigtrain


def checkout() -> Path:
    """Return the folder that contains ``bigtrain/``: the checkout, or site-packages if
    installed."""
    return Path(bigtrain.__file__).resolve().parents[1]


def recipes() -> Path:
    """Return the folder of the shipped run YAMLs."""
    return checkout() / "bigtrain" / "recipes"


def published_configuration(hub_name: str) -> Path:
    """Return the path of a Hub model's shipped config.json, for plans and checks without a
    network."""
    return recipes() / "configs" / f"{hub_name.replace('/', '--')}.json"


def ds_configs() -> Path:
    """Return ``ds_configs/``, the folder of the shipped DeepSpeed JSONs."""
    return _beside("ds_configs")


def slurm_script(name: str) -> Path:
    """Return ``slurm/NAME``."""
    return _beside("slurm") / name


def _beside(name: str) -> Path:
    """Return a folder next to the package in a checkout, inside it if installed."""
    installed = checkout() / "bigtrain" / name
    return installed if installed.is_dir() else checkout() / name
