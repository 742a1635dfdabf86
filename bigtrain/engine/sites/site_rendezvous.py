"""Rendezvous of sites: connects ranks of different sites, beside each site's process group.

Site 0's main rank serves a store at ``sites.address``. There each site publishes its facts, and
ranks that hold the same elements open groups across sites. Data from other sites is JSON and bytes
of tensors: nothing of it is unpickled.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bigtrain.engine.sites.counterparts import Ranks
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.errors import LaunchError
from bigtrain.models.torch_patches import gloo_group
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.system.listening import listen_only_at
from bigtrain.system.world import World

_CONNECT = timedelta(seconds=10)  # one try
_PAUSE_SECONDS = 0.2
_MOST_NAMED = 8

Facts = Mapping[str, Any]
"""What sites compare: JSON values by name."""


class _DifferenceError(LaunchError):
    """Which every site has found."""


class SiteRendezvous:
    """The other sites, for one rank of this one. Every method is collective over all sites.

    Entered with `join`. Errors of one rank are raised on all ranks of its site.
    """

    def __init__(self, sites: SitesSection, world: World, store: Any) -> None:
        self.sites = sites
        self._world = world
        self._store = store
        self._num_ranks = world.size  # of all sites
        self._published: dict[Ranks, list[str]] = {}

    @classmethod
    def join(cls, sites: SitesSection, world: World, facts: Facts) -> SiteRendezvous:
        """Join the other sites, and compare `facts` with theirs, the same on all ranks of a site.

        Raises LaunchError on every rank of every site that joined: if one did not join within
        ``sites.timeout_seconds``, or if facts differ, with both values.
        """
        if sites.count == 1:
            return cls(sites, world, None)
        store = on_all_ranks(lambda: _open_store(sites, world))
        rendezvous = cls(sites, world, store)

        def enter() -> None:
            if world.is_main:
                if store.add(f"starts/{sites.index}", 1) > 1:
                    raise LaunchError(
                        f"site {sites.index} has joined the rendezvous at {sites.address} before: "
                        "the other sites are still in that run, and end at their next outer step "
                        "-> start all sites again when they have (sites.timeout_seconds)"
                    )
                own = {"facts": facts, "num_ranks": world.size}
                store.set(f"facts/{sites.index}", json.dumps(own))
            found = rendezvous._read("facts", "the start")
            by_site = [dict(one.get("facts", {})) for one in found]
            rendezvous._num_ranks = sum(int(one.get("num_ranks", 1)) for one in found)
            try:
                refuse_differences(by_site)
            except _DifferenceError:
                # The main ranks, whose texts all ranks of a site raise; sizes may be what differs.
                if world.is_main:
                    rendezvous._leave("refused", sites.count)
                raise

        on_all_ranks(enter)
        return rendezvous

    @property
    def rank(self) -> int:
        """Of this process in its site."""
        return self._world.rank

    @property
    def own_ranks(self) -> Ranks:
        """The ranks with this one's number, of each site."""
        return (self._world.rank,) * self.sites.count

    def open_group(self, ranks: Ranks) -> Any:
        """A group of `ranks`, one of each site, this one among them; None for a site alone.

        Each of them must call it, and a rank in several groups for the smallest ranks first. Raises
        LaunchError, on this rank alone, if one cannot be reached.
        """
        if self.sites.count == 1:
            return None
        store = dist.PrefixStore(f"group/{_text(ranks)}", self._store)
        timeout = timedelta(seconds=self.sites.timeout_seconds)
        try:
            return gloo_group(
                store, self.sites.index, self.sites.count, timeout, _own_address(self.sites)
            )
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self._world.rank} of site {self.sites.index} cannot connect to its "
                f"counterparts on the other sites (ranks {_text(ranks)} of sites 0 to "
                f"{self.sites.count - 1}): {error} -> each host needs a connection to the hosts of "
                "the other sites, on any port"
            ) from error

    def tell(self, name: str, own: Any) -> list[list[Any]]:
        """What all ranks of all sites say under `name`, JSON, by site and rank. Call once for each
        name; raises as `compare`."""
        sites, rank = self.sites, self._world.rank
        if sites.count == 1:
            everyones: list[Any] = [own]
            if self._world.size > 1:
                everyones = [None] * self._world.size
                dist.all_gather_object(everyones, own)
            return [everyones]

        def read() -> list[list[Any]]:
            # A key for each rank: the store takes no values of many megabytes.
            self._set(f"{name}/{sites.index}/{rank}", {"own": own})
            self._set(f"{name} of/{sites.index}", {"num_ranks": self._world.size})
            sizes = [int(one["num_ranks"]) for one in self._read(f"{name} of", name)]
            keys = {f"{name}/{n}/{of}": n for n, size in enumerate(sizes) for of in range(size)}
            self._wait(keys, name)
            values = iter(self._values(keys) if rank == 0 else ())
            return [[next(values)["own"] for _ in range(size)] for size in sizes if rank == 0]

        box = [on_all_ranks(read)]
        if self._world.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def compare(self, name: str, facts: Mapping[Ranks, Facts]) -> None:
        """See that by group of ranks, one of each site, all say the same `facts` under `name`, once
        for each name.

        Raises LaunchError on every rank of every site where any two differ, and on every rank of
        this site where another says nothing within ``sites.timeout_seconds``.
        """
        self.agree(lambda: self.refuse_others(name, facts))

    def refuse_others(self, name: str, facts: Mapping[Ranks, Facts]) -> None:
        """As `compare`, without the other ranks of this site: raises on this rank alone."""
        for ranks in facts:
            self._set(f"{_prefix(ranks, name)}/{self.sites.index}", facts[ranks])
        for ranks in facts:
            refuse_differences(self._gather(name, facts[ranks], ranks))

    def agree(self, compare: Callable[[], None]) -> None:
        """`compare` on all ranks of this site, whose errors all of them raise. That sites differ,
        all of them find out: site 0 serves until they have."""
        try:
            on_all_ranks(compare)
        except _DifferenceError:
            self._leave("different", self._num_ranks)
            raise

    def _gather(self, name: str, facts: Facts, ranks: Ranks) -> list[Facts]:
        """What `ranks` have published under `name`, by site.

        Raises LaunchError if a site publishes nothing within ``sites.timeout_seconds``.
        """
        if self.sites.count == 1:
            return [facts]
        prefix = _prefix(ranks, name)
        found = self._read(prefix, name)
        # All sites are here, so nobody reads earlier keys of this group any more.
        published = self._published.setdefault(ranks, [])
        while published:
            self._store.delete_key(published.pop())
        published.append(f"{prefix}/{self.sites.index}")
        return found

    def _set(self, key: str, value: Facts) -> None:
        if self.sites.count > 1:
            try:
                self._store.set(key, json.dumps(value))
            except dist.DistError as error:
                raise _lost(self.sites, error) from error

    def _read(self, prefix: str, name: str) -> list[Facts]:
        """What each site publishes under `prefix`, when all of them have."""
        keys = {f"{prefix}/{index}": index for index in range(self.sites.count)}
        self._wait(keys, name)
        return self._values(keys)

    def _wait(self, keys: Mapping[str, int], name: str) -> None:
        """Until all keys are there, each of which is of a site."""
        end, pause = time.monotonic() + self.sites.timeout_seconds, 0.005
        try:
            # The store's own wait would print a warning, and block signals.
            while not self._store.check(list(keys)):
                if time.monotonic() > end:
                    raise self._missing(keys, name)
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_SECONDS)
        except dist.DistError as error:
            raise _lost(self.sites, error) from error

    def _values(self, keys: Iterable[str]) -> list[Facts]:
        try:
            return [dict(json.loads(self._store.get(key))) for key in keys]
        except dist.DistError as error:
            raise _lost(self.sites, error) from error
        except (ValueError, TypeError) as error:
            raise LaunchError(
                f"sites.address = {self.sites.address}: what was read there was not written by a "
                f"site of this version of bigtrain ({error})"
            ) from error

    def _missing(self, keys: Mapping[str, int], name: str) -> LaunchError:
        absent = {site for key, site in keys.items() if not self._store.check([key])}
        return LaunchError(
            f"{_named(sorted(absent))} did not join {name} within sites.timeout_seconds = "
            f"{self.sites.timeout_seconds:g} -> see what its log says; a larger "
            "sites.timeout_seconds waits longer for a slower one"
        )

    def close(self) -> None:
        """Wait until all ranks of all sites leave, so that none ends while another still reads."""
        if self.sites.count > 1:
            self._leave("left", self._num_ranks)

    def _leave(self, key: str, num_ranks: int) -> None:
        """Count this rank as done reading; the rank that serves the store waits for `num_ranks`."""
        end = time.monotonic() + self.sites.timeout_seconds
        try:
            here = self._store.add(key, 1)
            while self._keeps and here < num_ranks and time.monotonic() < end:
                time.sleep(_PAUSE_SECONDS)
                here = self._store.add(key, 0)
        except dist.DistError:
            return  # site 0 has ended, and nobody reads any more

    @property
    def _keeps(self) -> bool:
        return self.sites.index == 0 and self._world.is_main


def refuse_differences(by_site: Sequence[Facts]) -> None:
    """Raises LaunchError if a site differs from site 0, listing all differences."""
    lines = []
    for index, facts in enumerate(by_site):
        for key in sorted({*by_site[0], *facts}):
            there, here = by_site[0].get(key), facts.get(key)
            if there != here:
                lines.append(f"  {key}: {there!r} at site 0, {here!r} at site {index}")
    if lines:
        raise _DifferenceError(
            "sites differ in what has to be the same -> give all of them the same settings and "
            "data:\n" + "\n".join(lines)
        )


def _open_store(sites: SitesSection, world: World) -> Any:
    host, port = sites.host, sites.port
    keeps = sites.index == 0 and world.is_main
    end = time.monotonic() + sites.timeout_seconds
    bound = listen_only_at(host, port) if keeps else None
    while True:
        try:
            return dist.TCPStore(
                host,
                port,
                is_master=keeps,
                timeout=min(_CONNECT, timedelta(seconds=sites.timeout_seconds)),
                wait_for_workers=False,
                master_listen_fd=bound.detach() if bound is not None else None,
            )
        except dist.DistError as error:
            if keeps:
                raise LaunchError(
                    f"sites.address = {sites.address}: port {port} of {socket.gethostname()} "
                    f"cannot be used: {error} -> end what uses it, or choose another port on all "
                    "sites"
                ) from error
            if time.monotonic() > end:
                raise LaunchError(
                    f"sites.address = {sites.address} cannot be reached from "
                    f"{socket.gethostname()} within sites.timeout_seconds = "
                    f"{sites.timeout_seconds:g}: {error} -> it is the host of site 0's main rank; "
                    "is site 0 started, and is the port open?"
                ) from error


def _own_address(sites: SitesSection) -> str:
    """This host's address on the network of the rendezvous, at which other sites reach it."""
    family, _, _, _, place = socket.getaddrinfo(sites.host, sites.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def _lost(sites: SitesSection, error: Exception) -> LaunchError:
    return LaunchError(
        f"the rendezvous at {sites.address} is gone, and with it site 0, which serves it: see what "
        f"site 0 says ({error})"
    )


def _text(ranks: Ranks) -> str:
    return "-".join(map(str, ranks))


def _prefix(ranks: Ranks, name: str) -> str:
    return f"ranks/{_text(ranks)}/{name}"


def _named(absent: Sequence[int]) -> str:
    shown = ", ".join(map(str, absent[:_MOST_NAMED]))
    return f"site {shown}" + (", ..." if len(absent) > _MOST_NAMED else "")
