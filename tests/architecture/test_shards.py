"""Shards of the slow tests hold each test once, and none takes over ten minutes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.shards import SHARD_SECONDS, choose, cut
from tests.support.worlds import ROOT

FUNCTIONS = st.lists(st.tuples(st.floats(0.1, 400), st.integers(1, 60)), min_size=1, max_size=30)


@given(FUNCTIONS)
def test_every_test_is_in_one_shard_of_bounded_time(functions: list[tuple[float, int]]) -> None:
    times = {f"f.py::t{n}": seconds for n, (seconds, _) in enumerate(functions)}
    tests = [f"f.py::t{n}[{i}]" for n, (_, many) in enumerate(functions) for i in range(many)]
    shards = cut(tests, times)
    assert sorted(test for shard in shards for test in shard.tests) == sorted(tests)
    longest = max(times.values())
    for shard in shards:
        assert shard.seconds <= SHARD_SECONDS + longest / 2
        assert shard.untimed == ()
    assert {choose(shards, str(number + 1)).index for number in range(len(shards))} == set(
        range(len(shards))
    )


def test_what_was_never_timed_is_named() -> None:
    (shard,) = cut(["f.py::known", "f.py::new[1]", "f.py::new[2]"], {"f.py::known": 1.0})
    assert shard.untimed == ("f.py::new",)
    assert str(shard) == "slow shard 1 of 1: 3 tests, 41 s when last timed; never timed: f.py::new"


def test_commits_choose_all_shards() -> None:
    shards = cut(
        [f"f.py::t{n}" for n in range(5)], {f"f.py::t{n}": SHARD_SECONDS for n in range(5)}
    )
    assert len(shards) == 5
    assert {choose(shards, f"{commit:040x}").index for commit in range(100, 110)} == set(range(5))
    with pytest.raises(ValueError, match="--slow-shard 6: the slow tests have shards 1 to 5"):
        choose(shards, "6")


def test_pytest_runs_the_tests_of_the_shard_and_names_it() -> None:
    options = "-q -p no:cacheprovider -n 2 --collect-only --slow-shard 1"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), "tests/unit/planner/test_fit.py"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "slow shard 1 of 1: 1 tests" in result.stdout, result.stdout + result.stderr
