"""What every test may use, and the environment that tests and their child processes run in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.support.worlds import ROOT
from tests.support.worlds import free_port as find_free_port

RunCli = Callable[..., subprocess.CompletedProcess[str]]

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
"""One of `make test`'s processes, which has the environment of the one that started it."""

_running: dict[str, float] = {}
"""Tests that have begun and not ended, and when (s), in the process that prints."""


def pytest_configure() -> None:
    """Before any test module imports a library that reads these once.

    TORCH_EXTENSIONS_DIR stays as it is: DeepSpeed's CPU operators are compiled once per machine.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # several processes share few cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test uses the network
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    # What bigtrain keeps between runs (`bigtrain.system.user_cache`) is found out by each test
    # session, once for all its processes. Not XDG_CACHE_HOME, which moves what PyTorch compiles.
    if not _IS_WORKER:
        os.environ["BIGTRAIN_CACHE"] = tempfile.mkdtemp(prefix="bigtrain-tests-")
    # Where the shell forbids it, each of hundreds of processes would compile what it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # DeepSpeed looks for the ninja of this environment on PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # A shell's `nohup make test &` has it ignored, and so would every program that a test starts,
    # of which some are ended by it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On a busy machine an example may take any time, and so may making one.
    settings.register_profile(
        "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unhurried")


def pytest_unconfigure() -> None:
    if not _IS_WORKER:
        shutil.rmtree(os.environ["BIGTRAIN_CACHE"], ignore_errors=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    _running[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    _running.pop(nodeid, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What an interruption met: of tests that take too long, this one is to be fixed."""
    for nodeid, began in _running.items():
        seconds = time.monotonic() - began
        terminalreporter.write_line(f"NOT ENDED {nodeid} after {seconds:.0f} s", red=True)


class _FilesTogether(LoadFileScheduling):  # type: ignore[misc]
    """Tests of one file run in one of `make test`'s processes, for what they share is made once.

    Those of tests/cluster run in one, too: they share their hosts and their Slurm.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "tests/cluster" if file.startswith("tests/cluster/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _FilesTogether:
    """xdist's own loadgroup (3.8) changes names of tests, which pytest 9.2 does not see."""
    return _FilesTogether(config, log)


@pytest.fixture(scope="session")
def run_cli() -> RunCli:
    """``run_cli("check", "--config", "x.yaml", cwd=tmp_path)``: `bigtrain` as a process.

    Never raises for an exit code; `stdout` and `stderr` of the result are text.
    """

    def run(*args: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "bigtrain.cli", *map(str, args)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on just now."""
    return find_free_port()


@pytest.fixture(scope="module", autouse=True)
def libraries_as_they_were() -> Iterator[None]:
    """What DeepSpeed leaves in a process that had an engine, gone before the next file's tests.

    It replaces `torch.nn.functional.linear` where ZeRO 3 partitions (0.19.8,
    runtime/zero/partition_parameters.py), and keeps the process groups of an engine. A run has one
    engine to a process; of test files several share one.
    """
    yield
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        torch = sys.modules["torch"]
        torch.nn.functional.linear = torch._C._nn.linear
        if not torch.distributed.is_initialized():
            groups._release_process_group_references()
