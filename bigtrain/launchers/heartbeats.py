"""Heartbeats of the agents of an elastic run, a key for each at the store of the rendezvous. Pure.

Every agent writes a key once per interval, and watches the `NUM_WATCHED` agents after it in an
order on which all agents agree. Hosts are ordered by hashes of their names, so hosts of a rack are
not neighbours, and when a host is lost only the agents that watched it get another host to watch.
An agent that finds a host silent removes it from the state of the rendezvous, which all read. If
all agents that watch a host are lost with it, it is found a timeout later.

The state is read only when it has changed: a look reads its number of changes and the keys of the
watched hosts in one request, whose size does not grow with the number of hosts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

from bigtrain.launchers.membership import SilenceDetector

Host = TypeVar("Host", bound=Hashable)

NUM_WATCHED = 8
"""Hosts that an agent watches: if half of all are lost at once, one in 256 is found a timeout
later."""

_LOOK_SECONDS = 0.2  # between two looks of an agent
_LOOKS_PER_SECOND = 5000  # of all agents together
_LONGEST_GAP_SECONDS = 1.5


def look_seconds(num_hosts: int) -> float:
    """Return the seconds between two looks of an agent at the rendezvous."""
    return max(_LOOK_SECONDS, num_hosts / _LOOKS_PER_SECOND)


def watched(host: Host, hosts: Collection[Host]) -> list[Host]:
    """Return the hosts among `hosts` that `host` watches."""
    order = sorted(
        {*hosts, host}, key=lambda member: hashlib.sha256(repr(member).encode()).digest()
    )
    index = order.index(host)
    return (order[index + 1 :] + order[:index])[:NUM_WATCHED]  # the first follows the last


class Heartbeats(Generic[Host]):
    """Heartbeats of an agent and of the hosts that it watches; `silent` are the hosts without a
    heartbeat for `timeout` seconds at the last look. Hosts are named by their `repr`.

    call: calls a method of the store (`set`, `add`, `multi_get`) with arguments. The keys begin
    with `prefix`. An agent writes its key before it appears in the state, since reading a key that
    does not exist blocks.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        prefix: str,
        host: Host,
        *,
        timeout: float,
        look_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call, self._prefix, self._host = call, prefix, host
        self._look_seconds, self._clock = look_seconds, clock
        self._detector: SilenceDetector[Host] = SilenceDetector(
            timeout, max(_LONGEST_GAP_SECONDS, 2 * look_seconds), clock
        )
        self._num_beats = 0
        self._hosts: frozenset[Host] = frozenset()
        self._watched: list[Host] = []
        self._looked_at = -1.0
        self._num_changes: bytes | None = None
        self.silent: list[Host] = []
        self._changes_key = f"{prefix}/changes"
        call("add", self._changes_key, 0)  # creates the key: reading a missing one blocks
        self.beat()

    def beat(self) -> None:
        """Write a heartbeat of this host."""
        self._num_beats += 1
        self._call("set", self._key(self._host), str(self._num_beats))

    def watch(self, hosts: Collection[Host]) -> None:
        """Watch some of `hosts` from the next look on."""
        if self._hosts != frozenset(hosts):
            self._hosts = frozenset(hosts)
            self._watched = watched(self._host, self._hosts)

    def look(self) -> bool:
        """Read the heartbeats of the watched hosts, unless the last look was a moment ago. Return
        whether the state or the list of silent hosts has changed since the last look."""
        now = self._clock()
        if 0 <= self._looked_at and now - self._looked_at < self._look_seconds / 2:
            return False
        keys = [self._changes_key, *map(self._key, self._watched)]
        num_changes, *values = self._call("multi_get", keys)
        self._looked_at = now
        silent = self._detector.silent(dict(zip(self._watched, values, strict=True)))
        is_changed = num_changes != self._num_changes or silent != self.silent
        self._num_changes, self.silent = num_changes, silent
        return bool(is_changed)

    def announce_change(self) -> None:
        """Let all agents read the state at their next look."""
        self._call("add", self._changes_key, 1)

    def _key(self, host: Host) -> str:
        return f"{self._prefix}/heartbeat/{host!r}"
