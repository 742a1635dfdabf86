"""Which hosts watch each other, and what an agent reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bigtrain.launchers.heartbeats import NUM_WATCHED, Heartbeats, look_seconds, watched

HOSTS = [f"n{i}" for i in range(100)]


def test_every_host_is_watched_by_as_many() -> None:
    watchers = Counter(name for host in HOSTS for name in watched(host, HOSTS))
    assert set(watchers) == set(HOSTS)
    assert set(watchers.values()) == {NUM_WATCHED}
    assert all(host not in watched(host, HOSTS) for host in HOSTS)


def test_few_hosts_all_watch_each_other() -> None:
    for host in HOSTS[:3]:
        assert {host, *watched(host, HOSTS[:3])} == set(HOSTS[:3])
    assert watched("n0", []) == []


def test_a_lost_host_changes_what_its_watchers_watch_only() -> None:
    """So the time of silence of all others is kept."""
    rest = [host for host in HOSTS if host != "n50"]
    changed = [host for host in rest if watched(host, HOSTS) != watched(host, rest)]
    assert len(changed) == NUM_WATCHED
    for host in changed:
        before, after = set(watched(host, HOSTS)), set(watched(host, rest))
        assert before - after == {"n50"}


def test_neighbours_of_a_rack_do_not_only_watch_each_other() -> None:
    rack = set(HOSTS[:16])
    watchers = {host: [each for each in HOSTS if host in watched(each, HOSTS)] for host in rack}
    assert all(set(watchers_of_host) - rack for watchers_of_host in watchers.values())


@pytest.mark.parametrize(("num_hosts", "seconds"), [(2, 0.2), (1000, 0.2), (10_000, 2.0)])
def test_looks_are_as_many_as_the_rendezvous_answers(num_hosts: int, seconds: float) -> None:
    assert look_seconds(num_hosts) == seconds


def test_a_look_reads_once_and_reports_changes() -> None:
    now, values, calls = [0.0], {}, []

    def call(name: str, *arguments: Any) -> Any:
        calls.append(name)
        if name == "multi_get":
            return [values[key] for key in arguments[0]]
        key, value = arguments
        values[key] = str(int(values.get(key, 0)) + value) if name == "add" else value
        return None

    agents = {
        name: Heartbeats(call, "p", name, timeout=4.0, look_seconds=0.2, clock=lambda: now[0])
        for name in "ab"
    }
    assert sorted(values) == ["p/changes", "p/heartbeat/'a'", "p/heartbeat/'b'"]
    first = agents["a"]
    first.watch("ab")
    assert first.look()  # the first one
    calls.clear()
    assert not first.look()  # a moment later
    assert calls == []
    now[0] = 1.0
    assert not first.look()
    assert calls == ["multi_get"]
    agents["b"].announce_change()
    now[0] = 2.0
    assert first.look()
    for now[0] in (3.0, 3.9):
        assert not first.look()
    now[0] = 4.0
    assert first.look()
    assert first.silent == ["b"]
    agents["b"].beat()
    now[0] = 5.0
    assert first.look()
    assert first.silent == []
