"""One line instead of a traceback for a Python that lacks bigtrain's packages. Imports no other
module of bigtrain and no package."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def report_missing_package(
    error_type: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print one line on a package that cannot be imported, and exit with 2: the program was started
    outside of the environment. As `sys.excepthook` during imports; any other error, and a missing
    module of bigtrain itself, keeps its traceback."""
    package = getattr(error, "name", None) or ""
    if not issubclass(error_type, ModuleNotFoundError) or package.startswith("bigtrain"):
        sys.__excepthook__(error_type, error, trace)
        return
    python = f"{sys.executable} (Python {sys.version.split()[0]})"
    print(
        f"train.py: {python} has no package {package!r} -> activate the environment in which "
        "bigtrain is installed (. .venv/bin/activate), or start with its python",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)
