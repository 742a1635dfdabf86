"""DeepSpeed's compiled operators: built once, and never blocked by a build that was killed.

torch 2.13 creates a lock file at every load of an operator, which outlives a killed process and
blocks all later loads (utils/file_baton.py). So an operator is compiled in a private folder; the
library is then renamed to its final path, and loaded from there without a lock. The name contains a
hash of the sources, flags, versions and CPU, so that environments do not overwrite libraries of
other environments. flock only prevents two processes from compiling an operator at once; without
flock the operator is compiled twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch

from bigtrain.engine.deepspeed_patches.startup import operators_loaded_by
from bigtrain.system.user_cache import processor

_PACKAGE = Path(deepspeed.__file__).resolve().parent
_PARTIAL = ".partial-"
# A host that has failed may keep a lock on a file server (NFS 3) until it comes back.
_MOST_WAIT_SECONDS = 600.0


def operators_without_locks() -> AbstractContextManager[None]:
    """Load operators that DeepSpeed compiles inside by `load_operator`, except operators that
    training never calls."""
    return operators_loaded_by(load_operator)


def load_operator(
    load: Callable[..., ModuleType], name: str, sources: Sequence[str], **build: Any
) -> ModuleType:
    """Return the result of `load` (`torch.utils.cpp_extension.load`) called with `name`, `sources`
    and `build`. Compiles the operator if it is not cached. Raises the errors of `load`."""
    # The folder's name is a hash of everything that a library depends on, except the compiler,
    # whose output stays valid.
    include_paths = [Path(path).resolve() for path in build.get("extra_include_paths") or ()]
    package_paths = [path for path in include_paths if path.is_relative_to(_PACKAGE)]
    headers = sorted(
        file for path in package_paths for file in path.rglob("*.h*") if file.is_file()
    )
    flag_keys = sorted(build.keys() - {"extra_include_paths", "verbose"})
    flags = [build.get(key) for key in flag_keys]
    versions = (torch.__version__, torch.version.git_version, deepspeed.__version__)
    system = (sysconfig.get_config_var("SOABI"), os.confstr("CS_GNU_LIBC_VERSION"))
    # ``-march=native`` uses CPU features; hosts with one home directory may have different CPUs.
    digest = hashlib.sha256(repr((name, flags, versions, system, processor())).encode())
    for file in (*map(Path, sources), *headers):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    folder = operators_folder() / f"{name}-{digest.hexdigest()[:16]}"
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(library):
            if not library.exists():
                return _compile(partial(load, name, list(sources), **build), library)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operators_folder() -> Path:
    """Return bigtrain's subfolder of TORCH_EXTENSIONS_DIR."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(cache) / "torch_extensions")
    return Path(root) / "bigtrain"


@contextmanager
def _one_at_a_time(library: Path) -> Iterator[None]:
    """Wait until `library` exists or no other process compiles it, for ten minutes at most."""
    descriptor = os.open(library.parent / "flock", os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + _MOST_WAIT_SECONDS
    try:
        while not library.exists() and time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
                continue
            except OSError:  # a file system without flock
                break
            # No other process compiles now: partial folders belong to processes that were killed.
            for abandoned in library.parent.glob(f"{_PARTIAL}*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            break
        yield
    finally:
        os.close(descriptor)


def _compile(load: Callable[..., ModuleType], library: Path) -> ModuleType:
    """Compile by `load` in a private folder, move the result to `library`, and return it loaded."""
    folder = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=library.parent))
    try:
        module = load(build_directory=str(folder))
        built = folder / library.name
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.rename(library)
        return module
    finally:
        shutil.rmtree(folder, ignore_errors=True)
