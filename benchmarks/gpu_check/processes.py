"""A part in a process of its own, which is ended at its limit and answers by a file.

Forked from a process that has imported everything (`fork`), a part costs no imports, which take
about ten seconds. That needs a parent which has not touched CUDA; where a fork cannot use CUDA,
each part gets a new process (`fresh`), as a user's program is.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu_check.results import Function, Part, Setup, Start

ROOT = Path(__file__).resolve().parents[2]
RESULT, LOG = "part.json", "log.txt"
_SECONDS_TO_END = 5.0


def prepare_forks() -> None:
    """Import the modules of every part once, and keep all of it out of garbage collections.

    DeepSpeed imports its Muon, and with it torch's compiler, at the first engine, and collects
    garbage several times in each: seconds of every part.
    """
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    importlib.import_module("torch.profiler")
    gc.collect()
    gc.freeze()


def run_part(name: str, function: Function, setup: Setup, start: Start) -> Part:
    """Run a part to its end or its limit (`setup.seconds`); never raises for what it does."""
    setup.directory.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    log = setup.directory / LOG
    if start == "fork":
        pid = fork(lambda: execute(name, function, setup), log)
    else:
        # By its own module, not the `__main__` of this process.
        pid = _spawn(["--part", json.dumps(asdict(setup), default=str), name], log)
    code = wait(pid, setup.seconds)
    part = _read(setup.directory / RESULT) or Part(name)
    part.seconds = time.monotonic() - begun
    if code is None:
        part.fail(f"took longer than its limit of {setup.seconds:.0f} s; {last_lines(log)}")
    elif code:
        part.fail(f"ended with code {code}; {last_lines(log)}")
    return part


def execute(name: str, function: Function, setup: Setup) -> None:
    """Run a part in this process, and write its result next to its other files."""
    part = Part(name)
    try:
        function(setup, part)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        part.fail(f"{type(error).__name__}: {text}")
    finally:
        write(setup.directory / RESULT, asdict(part))


def fork(call: Callable[[], Any], log: Path) -> int:
    """Start `call` in a forked process with a session of its own, its output in `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be(call, log)
    return pid


def _be(call: Callable[[], Any], log: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        answer = call()
        code = answer if isinstance(answer, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by way of Python's end, which belongs to the process that was forked.
        os._exit(code)


def _spawn(arguments: list[str], log: Path) -> int:
    """Start `runner.py` with `arguments` in a process and session of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _python_path()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    process.returncode = 0  # `wait` below is who waits for it
    return process.pid


def _python_path() -> str:
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT), *([given] if given else [])])


def wait(pid: int, limit_seconds: float) -> int | None:
    """Return the exit code (negative: the signal), or None if the time limit ended it and all it
    started."""
    end = time.monotonic() + limit_seconds
    pause = 0.01
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
    _end_session(pid)
    os.waitpid(pid, 0)
    return None


def _end_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has not come to its session yet
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Life:
    """A forked process that has ended. code: None where it ran over its limit."""

    code: int | None
    output: str


def live(
    target: str, arguments: dict[str, Any], setup: Setup, log: Path, limit_seconds: float
) -> Life:
    """Run a function in a process of its own, from a part that has not touched CUDA itself.

    target: ``MODULE:FUNCTION`` of this package; arguments: its keyword arguments, as JSON holds
    them. The exit code is the integer that it returns, 0 for anything else, 1 for an exception.
    """
    if setup.start == "fork":
        pid = fork(lambda: call(target, arguments), log)
    else:
        pid = _spawn(["--call", target, json.dumps(arguments)], log)
    code = wait(pid, limit_seconds)
    return Life(code, log.read_text(errors="replace") if log.exists() else "")


def call(target: str, arguments: dict[str, Any]) -> int:
    """Call `target` with `arguments`, in the process of `live`."""
    module, _, name = target.partition(":")
    answer = getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), name)(**arguments)
    return answer if isinstance(answer, int) else 0


def last_lines(log: Path, num_lines: int = 3) -> str:
    """Return the end of a part's log, as a reason; without DeepSpeed's progress."""
    if not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "log ends: " + " / ".join(line[:200] for line in lines[-num_lines:]) if lines else ""


def write(path: Path, tree: dict[str, Any]) -> None:
    """Write JSON atomically."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(tree, default=str))
    temporary.rename(path)


def _read(path: Path) -> Part | None:
    try:
        return Part(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_setup(text: str) -> Setup:
    """Return the `Setup` that `run_part` gave a fresh process."""
    tree = json.loads(text)
    return replace(Setup(**tree), directory=Path(tree["directory"]))
