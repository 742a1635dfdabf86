"""What Triton needs on a host to build kernels. Pure."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def triton_problem() -> str:
    """Return why Triton cannot build kernels on this host; empty if nothing is missing. It compiles
    the launcher of each kernel with a C compiler and Python's headers, which slim images lack
    (triton/runtime/build.py, 3.9)."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC = {compiler!r} is none"
    if compiler is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton needs a C compiler, and there is neither gcc nor clang"
    # Debian's own scheme names a folder that has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not header.is_file():
        return f"Triton needs Python's headers, and {header} is missing (Debian: python3-dev)"
    return ""
