"""The parts of a recovery are read from the lines that agents and ranks really log."""

from __future__ import annotations

from datetime import datetime

import pytest

from benchmarks.recovery import PARTS, Recovery, agent_lines, rank_seconds
from bigtrain.run.diagnostics.start_times import FIRST_STEP, GROUPS, IMPORTS, StartTimes

AGENT = """\
I1125 22:32:59.124000 17 .venv/torch/distributed/elastic/agent/server/api.py:715] [default] Starting
step 3030/1000000 loss 0.006294
[W1125 22:33:30.201389514 socket.cpp:207] [c10d] The hostname of the client socket
I1125 22:33:01.500000 17 .venv/torch/distributed/elastic/agent/server/api.py:943] FAILED. 99 left
"""


def test_lines_of_agents_have_times() -> None:
    first, second = agent_lines(AGENT)
    year = datetime.now().year
    assert first == (
        datetime(year, 11, 25, 22, 32, 59, 124000).timestamp(),
        "[default] Starting",
    )
    assert second[0] - first[0] == pytest.approx(2.376)


def test_parts_of_a_rank_are_those_of_its_line() -> None:
    times = StartTimes(now=iter([14.0, 15.5, 17.0]).__next__, began=lambda: 10.0)
    for part in (IMPORTS, GROUPS, FIRST_STEP):
        times.end(part)
    older = "2026-11-25T22:32:59+00:00 the first step ended at 1.000, 1.00 s after the start: a 1\n"
    log = f"{older}2026-11-25T22:33:59+00:00 {times.text()}\nstep 3\n"
    assert rank_seconds(log) == {IMPORTS: 4.0, GROUPS: 1.5, FIRST_STEP: 1.5}


def test_the_total_is_the_sum_of_the_parts() -> None:
    assert Recovery("rank", dict.fromkeys(PARTS, 1.0), 3).total == len(PARTS)
