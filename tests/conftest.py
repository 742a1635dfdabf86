"""What every test may use, and the environment that tests and their child processes run in."""

from __future__ import annotations

import gc
import os
import random
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

from tests.support import shards, skips
from tests.support.descriptors import check_descriptors
from tests.support.worlds import ROOT
from tests.support.worlds import free_port as find_free_port

RunCli = Callable[..., subprocess.CompletedProcess[str]]

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
"""One of `make test`'s processes, which has the environment of the one that started it."""

_running: dict[str, float] = {}
"""Tests that have begun and not ended, and when (s), in the process that prints."""


_slow_seconds: dict[str, float] = {}
"""Seconds of tests with their set-up and tear-down, where they are asked for."""


SLOW_TIMEOUT_SECONDS = 1800
"""For a slow test without a time-out of its own: minutes on a machine with nothing else to do."""

_shards_run: set[str] = set()
"""The chosen shard of the slow tests, in the process that prints."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-shard", help="run one shard of the slow tests: number or commit hash")
    parser.addoption(
        "--slow-times", action="store_true", help="write tests/slow_times.json from this run"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the chosen shard of the slow tests (`tests/support/shards.py`); none if it does not
    exist, which the last lines say."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    for item in slow:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_SECONDS))
    choice = config.getoption("--slow-shard")
    if choice is None:
        return
    tests: frozenset[str] = frozenset()
    try:
        shard = shards.choose(
            shards.cut([item.nodeid for item in slow], shards.read_times()), choice
        )
        text, tests = str(shard), shard.tests
    except ValueError as error:
        text = str(error)
    if _IS_WORKER:
        config.workeroutput["slow_shard"] = text  # type: ignore[attr-defined]
    else:
        _shards_run.add(text)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in tests])
    items[:] = [item for item in items if item.nodeid in tests]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "slow" in report.keywords:
        _slow_seconds[report.nodeid] = _slow_seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--slow-times") and not _IS_WORKER:
        shards.write_times(_slow_seconds, shards.read_times())


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports a library that reads these once.

    TORCH_EXTENSIONS_DIR stays as it is: DeepSpeed's CPU operators are compiled once per machine.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # several processes share few cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test uses the network
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    # What bigtrain keeps between runs (`bigtrain.system.user_cache`) is found out by each test
    # session, once for all its processes. Not XDG_CACHE_HOME, which moves what PyTorch compiles.
    config.pluginmanager.register(skips)
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


def pytest_sessionstart() -> None:
    gc.disable()  # it costs a quarter of the time of collecting tests, and finds nothing


def pytest_collection_finish() -> None:
    """Collect the garbage of tests alone: of the millions of objects that are imported by now,
    none becomes garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    if not _IS_WORKER:
        shutil.rmtree(os.environ["BIGTRAIN_CACHE"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Check the open descriptors after each file of tests, when its fixtures are torn down."""
    yield
    if nextitem is None or nextitem.path != item.path:
        check_descriptors()


def pytest_runtest_logstart(nodeid: str) -> None:
    _running[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    _running.pop(nodeid, None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over from a worker of xdist, which alone collects tests, which shard it chose."""
    shard = getattr(node, "workeroutput", {}).get("slow_shard")
    if shard is not None:
        _shards_run.add(shard)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What an interruption met: of tests that take too long, this one is to be fixed."""
    for shard in _shards_run:
        terminalreporter.write_line(shard)
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


@pytest.fixture(autouse=True)
def seeded_draws() -> None:
    """Seed Python's and PyTorch's generators before each test.

    Without it, what a test draws depends on the tests that ran before it in the same process.
    """
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


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
