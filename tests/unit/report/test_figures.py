"""Figures as people read them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bigtrain.report.figures import NOT_KNOWN, count, duration, headline, mean, number
from bigtrain.report.run_files import open_runs
from tests.support.run_directories import evaluation_line, make_run, step_line


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 2, NOT_KNOWN),
        (0.0, 2, "0.00"),
        (1234567.891, 1, "1,234,567.9"),
        (0.004, 2, "0.004"),
        (0.006, 2, "0.01"),
        (3e-9, 4, "3e-09"),
        (1e15, 0, "1e+15"),
    ],
)
def test_numbers(value: float | None, digits: int, text: str) -> None:
    assert number(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, NOT_KNOWN),
        ("5", NOT_KNOWN),
        (999_999, "999,999"),
        (4_194_304_000, "4,194,304,000 (4.19 B)"),
        (15 * 10**12, "15,000,000,000,000 (15 T)"),
        (10**18, "1e+18"),
    ],
)
def test_counts(value: object, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9.23, "9.2 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
        (11_220, "3 h 07 min"),
        (90_000, "1 d 01 h"),
        (math.inf, NOT_KNOWN),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_headline_of_a_run(tmp_path: Path) -> None:
    lines = [step_line(n, model_flops_utilization=n / 10, memory_gib=float(n)) for n in (1, 2, 3)]
    lines += [evaluation_line(step, loss) for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5))]
    [run] = open_runs([make_run(tmp_path / "run", lines, prediction={"peak_memory_gib": 2.5})])
    said = dict(headline(run))
    assert said["Steps"] == "3 of 1,000"
    assert said["Best held-out loss"] == "2.0000 at step 2"
    assert said["Model FLOPs utilization, mean"] == "20.0%"
    assert said["Peak memory"] == "3.00 GiB"
    assert said["Peak memory, predicted"] == "2.50 GiB"
    assert said["Throughput, predicted"] == NOT_KNOWN
    assert said["Training time"] == "1.5 s"
    assert said["Last loss"] == number(lines[2]["loss"], 4)
    assert "Time left" not in said  # a file is read at any time


@pytest.mark.parametrize(
    ("steps", "seconds", "total", "text"),
    [
        ([1, 2, 3], [0.5, 0.5, 0.5], 1001, "8 min 19 s"),
        ([10], [0.5], 1000, "8 min 15 s"),
        ([1, 2, 3], [0.5, 0.5, 0.5], 3, "0.0 s"),
        ([1, 2, 3], [0.5, 0.5, 0.5], None, NOT_KNOWN),
        ([], [], 1000, NOT_KNOWN),
        # The pace of the newest points: slow steps at the beginning do not count.
        (list(range(1, 102)), [900.0] * 50 + [1.0] * 51, 161, "1 min 00 s"),
    ],
)
def test_a_live_page_has_the_time_left(
    tmp_path: Path, steps: list[int], seconds: list[float], total: int | None, text: str
) -> None:
    lines = [step_line(n, step_seconds=s) for n, s in zip(steps, seconds, strict=True)]
    config = {"train": {"steps": total}}
    [run] = open_runs([make_run(tmp_path / "run", lines, config=config)])
    assert dict(headline(run, is_live=True))["Time left"] == text


def test_a_mean_leaves_gaps_out(tmp_path: Path) -> None:
    lines = [step_line(n, lr=None if n == 2 else float(n)) for n in (1, 2, 3)]
    [run] = open_runs([make_run(tmp_path / "run", lines)])
    assert mean(run, "lr") == 2.0
    assert mean(run, "model_flops_utilization") is None
