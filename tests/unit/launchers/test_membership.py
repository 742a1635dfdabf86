"""Hosts that have become silent, and ranks that are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bigtrain.launchers.membership import SilenceDetector, assign_ranks


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def observe(detector: SilenceDetector[str], clock: Clock, *rows: tuple[float, str]) -> list[str]:
    """Return the silent hosts after observations at ``(seconds, values of hosts a, b, ...)``."""
    silent: list[str] = []
    for seconds, values in rows:
        clock.seconds = 100 + seconds
        silent = detector.silent(dict(zip("abc", values, strict=False)))
    return silent


def test_a_host_is_silent_when_its_heartbeat_has_not_changed_for_long_enough() -> None:
    clock = Clock()
    detector: SilenceDetector[str] = SilenceDetector(4, 1.5, clock)
    rows = [(float(second), f"{second}0") for second in range(4)]
    assert observe(detector, clock, *rows) == []
    assert observe(detector, clock, (3.9, "40")) == []
    assert observe(detector, clock, (4.0, "50")) == ["b"]
    assert observe(detector, clock, (4.2, "61")) == []  # it is back


def test_values_are_only_compared_so_clocks_may_differ() -> None:
    clock = Clock()
    detector: SilenceDetector[str] = SilenceDetector(4, 1.5, clock)
    rows = [(float(second), ("99", "01")[second % 2]) for second in range(20)]
    assert observe(detector, clock, *rows) == []


def test_time_without_observations_counts_for_no_host() -> None:
    """The store did not answer for a minute, or this process was suspended."""
    clock = Clock()
    detector: SilenceDetector[str] = SilenceDetector(4, 1.5, clock)
    assert observe(detector, clock, (0, "00"), (60, "00")) == []
    assert observe(detector, clock, (61, "10"), (62.4, "20")) == []
    assert observe(detector, clock, (63, "30")) == ["b"]  # 1.5 s of the minute, and 3 s


def test_a_host_that_appears_has_its_full_time() -> None:
    clock = Clock()
    detector: SilenceDetector[str] = SilenceDetector(4, 1.5, clock)
    rows = [(float(second), str(second)) for second in range(6)]
    assert observe(detector, clock, *rows, (6, "60"), (7, "70"), (8, "80"), (9, "90")) == []
    assert observe(detector, clock, (10, "a0")) == ["b"]


def test_a_spare_gets_the_rank_of_the_host_that_it_replaces() -> None:
    before = {"a": 0, "b": 1, "c": 2}
    assert assign_ranks(["a", "c", "spare"], before) == {"a": 0, "spare": 1, "c": 2}
    assert assign_ranks(["a", "c"], before) == {"a": 0, "c": 1}
    assert assign_ranks(["b", "c"], before) == {"b": 1, "c": 0}
    assert sorted(assign_ranks(["a", "d", "b", "c"], before).items()) == [
        ("a", 0), ("b", 1), ("c", 2), ("d", 3),
    ]  # fmt: skip


HOSTS = st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=12)


@given(now=HOSTS, last=HOSTS)
def test_ranks_are_complete_and_kept_where_they_can_be(now: list[int], last: list[int]) -> None:
    before = {host: rank for rank, host in enumerate(last)}
    ranks = assign_ranks(now, before)
    assert sorted(ranks.values()) == list(range(len(now)))
    for host in now:
        if before.get(host, len(now)) < len(now):
            assert ranks[host] == before[host]
    assert ranks == assign_ranks(now[::-1], before)
