"""Versions of the libraries that all ranks of a run must share. Pure; imports none of them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import bigtrain

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "numpy", "bitsandbytes")


def library_versions() -> dict[str, str | None]:
    """Return the versions of Python, bigtrain and `PACKAGES` by name; None if not installed."""
    return {
        "Python": platform.python_version(),
        "bigtrain": bigtrain.__version__,
        **{name: version_of(name) for name in PACKAGES},
    }


def version_of(package: str) -> str | None:
    """Return the installed version of `package`; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
