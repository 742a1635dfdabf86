"""Hosts of an elastic run: which have become silent, and which rank each gets. Pure.

`bigtrain.launchers.elastic_patches` applies it to torch's rendezvous.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

Host = TypeVar("Host", bound=Hashable)


class _Heartbeat(NamedTuple):
    """Last value of a heartbeat, and when it changed, by the clock of this host."""

    value: object
    changed_at: float


class SilenceDetector(Generic[Host]):
    """Hosts whose heartbeat has not changed for `seconds`, by this host's own monotonic clock.

    The values of heartbeats are only compared for equality, so clocks of hosts may differ (torch
    compares time stamps of different hosts: with a timeout of 4 s, a clock that is 5 s late would
    be a lost host). Time in which this host observed nothing, because the store did not answer or
    the process was suspended, counts for no host: `longest_gap` is the longest time between two
    observations that is counted in full.
    """

    def __init__(
        self, seconds: float, longest_gap: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds, self._longest_gap, self._clock = seconds, longest_gap, clock
        self._heartbeats: dict[Host, _Heartbeat] = {}
        self._observed_at = clock()

    def silent(self, heartbeats: Mapping[Host, object]) -> list[Host]:
        """Return the hosts of `heartbeats` (the newest value by host) that are silent."""
        now = self._clock()
        unobserved_seconds = max(0.0, now - self._observed_at - self._longest_gap)
        self._observed_at = now
        newest = {}
        for host, value in heartbeats.items():
            changed_at, previous = now, self._heartbeats.get(host)
            if previous is not None and previous.value == value:
                changed_at = previous.changed_at + unobserved_seconds
            newest[host] = _Heartbeat(value, changed_at)
        self._heartbeats = newest
        return [host for host, beat in newest.items() if now - beat.changed_at >= self._seconds]


def assign_ranks(hosts: Collection[Host], previous_ranks: Mapping[Host, int]) -> dict[Host, int]:
    """Return the ranks of `hosts`. previous_ranks: of hosts in the last round.

    A host keeps its rank if that is below the new number of hosts. Free ranks go to the remaining
    hosts, hosts of the last round first: so a spare gets the rank of the host that it replaces,
    and every other host finds the parts of its ranks in its memory.
    """
    size = len(hosts)
    ranks = {host: previous_ranks[host] for host in hosts if previous_ranks.get(host, size) < size}
    without_rank = [host for host in hosts if host not in ranks]
    last = size + len(previous_ranks)
    without_rank.sort(key=lambda host: (previous_ranks.get(host, last), repr(host)))
    free_ranks = sorted(set(range(size)) - set(ranks.values()))
    return ranks | dict(zip(without_rank, free_ranks, strict=True))
