"""Where the files that ship with the package lie. Pure."""

from __future__ import annotations

from pathlib import Path

import bigtrain


def checkout() -> Path:
    """The folder that holds ``bigtrain/``: the checkout, or site-packages where installed."""
    return Path(bigtrain.__file__).resolve().parents[1]


def recipes() -> Path:
    """The folder of the run YAMLs that ship."""
    return checkout() / "bigtrain" / "recipes"


def published_configuration(hub_name: str) -> Path:
    """Where config.json of a hub's model would ship, for plans and checks without a network."""
    return recipes() / "configs" / f"{hub_name.replace('/', '--')}.json"


def ds_configs() -> Path:
    """``ds_configs/``, the DeepSpeed JSONs that ship."""
    return _beside("ds_configs")


def slurm_script(name: str) -> Path:
    """``slurm/NAME``."""
    return _beside("slurm") / name


def _beside(name: str) -> Path:
    """A folder that lies beside the package in a checkout, and inside it where installed."""
    installed = checkout() / "bigtrain" / name
    return installed if installed.is_dir() else checkout() / name
