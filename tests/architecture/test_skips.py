"""Tests that skip: which fail under continuous integration, and what `.ci/run` installs first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import skips
from tests.support.worlds import ROOT

PROGRAM = "fish is not installed: make test-deps"
TESTS = f'''
import pytest

pytest.importorskip("{{module}}")

@pytest.mark.skipif(True, reason="there is a GPU")
def test_device(): ...

def test_program():
    pytest.skip("{PROGRAM}")

@pytest.mark.xfail
def test_expected():
    assert False
'''


@pytest.mark.parametrize(
    ("mode", "reason", "fails"),
    [
        ("", PROGRAM, False),
        ("missing", PROGRAM, False),
        ("installed", PROGRAM, True),
        ("installed", "Chromium is not installed: make test-deps", True),
        ("missing", "today is Sunday", True),  # no excuse is the default
        ("installed", "Triton is not installed: make kernel-proof", False),
        ("installed", "could not import 'convert_hf_to_gguf': No module named", False),
        ("installed", "could not import 'bitsandbytes': No module named", True),
        ("missing", "needs root", False),
    ],
)
def test_which_skips_could_have_run(
    mode: str, reason: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SKIPS", mode)
    assert skips.could_have_run(reason) == fails


@pytest.mark.slow
def test_a_skip_that_could_have_run_fails(tmp_path: Path) -> None:
    """Also a complete file; in the processes of xdist. Each is named with its reason."""
    (tmp_path / "test_module.py").write_text(TESTS.replace("{module}", "json"))
    (tmp_path / "test_whole.py").write_text(TESTS.replace("{module}", "no_such_module"))
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.skips", "-n", "1"]
    options = ["-rs", "--no-fold-skipped", "--continue-on-collection-errors", "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_SKIPS": "installed"}
    environment.pop("PYTEST_XDIST_WORKER", None)

    finished = subprocess.run(
        [*command, *options, "--rootdir", tmp_path, tmp_path],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    text = f"{finished.stdout}{finished.returncode}"
    assert re.search(r"1 failed, 1 skipped, 1 xfailed, 1 error.*\n1$", text), text
    assert "could not import 'no_such_module'" in text
    assert PROGRAM in text
    assert re.search(r"SKIPPED .*test_device - Skipped: there is a GPU", text)


@pytest.mark.parametrize("installs", [True, False])
def test_continuous_integration_installs_first(tmp_path: Path, installs: bool) -> None:
    """Without the packages it continues and reports it; skipped tests are printed."""
    calls = tmp_path / "calls"
    make = tmp_path / "make"
    make.write_text(
        f"""#!/bin/sh
echo "$1 $TEST_SKIPS" >> {calls}
case $1 in
test-deps) exit {0 if installs else 2} ;;
test) echo "SKIPPED tests/a.py::test_b - {PROGRAM}"; echo "1 passed, 1 skipped in 0.10s" ;;
test-shard) echo "slow shard 1 of 9" ;;
esac
"""
    )
    make.chmod(0o755)
    (tmp_path / "checkout" / ".ci").mkdir(parents=True)
    script = tmp_path / "checkout" / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("TEST_SKIPS", None)
    finished = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[-1] == "1 passed, 1 skipped in 0.10s"
    assert lines.count(f"SKIPPED tests/a.py::test_b - {PROGRAM}") == 2  # as it ran, and at the end
    assert any("make test-deps failed" in line for line in lines) != installs
    mode = skips.INSTALLED if installs else skips.MISSING
    assert calls.read_text().splitlines()[0] == f"test-deps {skips.INSTALLED}"
    assert f"test {mode}" in calls.read_text().splitlines()
    assert f"test-shard {mode}" in calls.read_text().splitlines()


def test_a_reason_that_names_a_package_is_of_one_that_is_installed() -> None:
    """What tests look for is in the list of `make test-deps`."""
    makefile = (ROOT / "Makefile").read_text()
    [packages] = re.findall(r"^TEST_PACKAGES = (.*)$", makefile, flags=re.M)
    needed = {"chromium", "fish", "zsh", "openssh-server", "slurmctld", "slurmd", "munge", "pdsh"}
    assert needed <= set(packages.split())
