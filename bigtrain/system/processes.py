"""Start and exit of a training process: imports without garbage collection, exit without unloading
Python, one error message per launch. Pure.

Measured with torch 2.13, transformers 5.23 and deepspeed 0.19.8: of 7.1 CPU seconds from start to
exit, garbage collection takes 1.0 and unloading 2.0.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib.abc
import importlib.util
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NoReturn


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries inside the block: their objects live as long as the process, so the
    garbage collector need not traverse them, now or in later full collections."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that calls `action` after the module `name` is imported, which other finders
    find."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self.action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def hide_torchao_from_transformers() -> None:
    """Make transformers not find torchao, which it would import wherever it is installed: 0.7 s and
    four lines of output for quantized models that bigtrain does not train. Programs can import
    torchao as before. Does nothing once transformers has been imported."""
    name = "transformers.utils.import_utils"

    def find_nothing(module: ModuleType) -> None:
        module.is_torchao_available = lambda *_: False  # type: ignore[attr-defined]

    if name not in sys.modules and not any(
        isinstance(finder, _AfterImport) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _AfterImport(name, find_nothing))


def exit_process(status: int) -> NoReturn:
    """End this process with exit code `status`, without unloading Python.

    Threads are joined, `atexit` handlers run and streams are flushed, as usual. But process groups
    outlive `destroy_process_group` if DeepSpeed still refers to them, and if a thread of a group
    frees a tensor while Python is unloaded, the process of a successful run dies of SIGABRT
    ("terminate called without an active exception").
    """
    threading._shutdown()  # type: ignore[attr-defined]  # like multiprocessing does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or absent
            stream.flush()
    os._exit(status)


def process_start() -> float:
    """Return when this process started, in seconds since the epoch, to a hundredth of a second; now
    where the system does not report it. A forked process starts when it is forked."""
    try:
        stat = Path("/proc/self/stat").read_text()
        start_ticks = int(stat.rpartition(")")[2].split()[19])  # field 22 of proc(5), since boot
        start_seconds = start_ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()


_START_SECONDS = 30.0
"""Most time between the starts of the first and the last rank of a launch on a busy host."""


class HostErrorLog:
    """The errors that processes of one launch on this host have printed so far.

    An error that all ranks raise is printed once, and no rank waits for another. The log is a
    folder of empty files below the temporary directory: a file for each error text, and a file for
    each rank that had the error. The next process that fails removes the folders of launchers that
    have ended. If the folder is not writable, every rank prints.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Open the log. `environment`: MASTER_PORT distinguishes launches by the same parent
        process."""
        self._root = Path(tempfile.gettempdir())
        self._began = process_start()
        self._prefix = f"bigtrain-failures-{os.getuid()}-"
        port = "".join(filter(str.isdigit, environment.get("MASTER_PORT", "")))
        self._folder = self._root / f"{self._prefix}{os.getppid()}-{port}"
        self._rank = environment.get("RANK", "0")

    def is_first(self, text: str) -> bool:
        """Return whether this process is the first of the launch to report `text`."""
        try:
            for folder in self._root.glob(f"{self._prefix}*"):
                parent = folder.name.removeprefix(self._prefix).partition("-")[0]
                if not Path("/proc", parent).exists():
                    shutil.rmtree(folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                return True
            # Files of earlier launches by this parent stay, and this launch takes the next number:
            # a rank that removed files could remove one that another rank has just written.
            digest = hashlib.sha256(text.encode()).hexdigest()
            for number in itertools.count():
                error_file = self._folder / f"{digest}-{number}"
                rank_file = error_file.with_name(f"{error_file.name}-{self._rank}")
                is_earlier = error_file.exists() and not self._is_of_this_launch(
                    error_file, _START_SECONDS
                )
                if not (is_earlier or rank_file.exists()):
                    break
            rank_file.touch()
            error_file.touch(exist_ok=False)  # fails unless this rank is the first
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def is_any(self) -> bool:
        """Return whether any process of this launch has reported an error."""
        with suppress(OSError):
            return self._is_ours() and any(map(self._is_of_this_launch, self._folder.iterdir()))
        return False

    def _is_ours(self) -> bool:
        return self._folder.is_dir() and self._folder.lstat().st_uid == os.getuid()

    def _is_of_this_launch(self, file: Path, tolerance: float = 0) -> bool:
        """Return whether a file was written after this process began, or at most `tolerance`
        seconds before."""
        return file.exists() and file.stat().st_mtime >= self._began - tolerance
