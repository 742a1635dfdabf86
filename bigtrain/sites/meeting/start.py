"""How a site's main rank finds the others: those that start as well, or a group that trains."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from bigtrain.errors import LaunchError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.meeting.doors import Door, Place, listens, place_of
from bigtrain.sites.meeting.roll_call import RollCall

_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 2.0
_REFUSED_SECONDS = 10.0
_MOST_NAMED = 8

Facts = Mapping[str, Any]
"""What sites compare: JSON values by name."""
Places = Mapping[int, Place]


class LostSiteError(LaunchError):
    """Another site does not answer, or not in time: this one goes on without it. unusable: the site
    whose values no outer step may use, where that is the reason."""

    def __init__(self, text: str, unusable: int | None = None) -> None:
        super().__init__(text, unusable)
        self.unusable = unusable

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Known:
    """What a site has from earlier launches. is_new: nothing; then all sites have to come. places:
    the doors of other sites."""

    is_new: bool = True
    places: Places = field(default_factory=dict)


class Start:
    """How a site's main rank finds others. What `enter` finds: `members` that start together, whose
    ranks meet at the door `place`; this site alone where it is the only one, and where others train
    already, whose `leader` its `roll_call` follows. plain: what those say under that name.
    """

    def __init__(self, sites: SitesSection, facts: Facts, known: Known) -> None:
        self.sites = sites
        self.members: tuple[int, ...] = (sites.index,)
        self.leader = sites.index
        self.place: Place = ("", 0)
        self.plain: list[str] | None = None
        self.roll_call: RollCall | None = None
        self._facts = facts
        self._known = known
        self._name = secrets.token_hex(6)
        self._end = time.monotonic() + sites.timeout_seconds
        self._looked = 0.0
        self._own: Place = ("", 0)

    def enter(self) -> None:
        """Raises LaunchError as `SiteRendezvous.join` says."""
        sites = self.sites
        door = self._own_door()
        self._own = door.place
        door.set("facts", self._facts)
        own = {"facts": self._facts, "place": door.place, "name": self._name}
        try:
            group = self._gather(door, own) if sites.index == 0 else self._come(own)
        except (ValueError, TypeError, KeyError) as error:
            raise not_of_a_site((sites.host, sites.port), error) from error
        index, known = sites.index, self._known
        places = {**known.places, index: door.place}
        started = {} if group is None else {site: one["name"] for site, one in group.items()}
        if group is not None:
            places |= {site: place_of(one["place"]) for site, one in group.items()}
            self.members, self.place = tuple(sorted(group)), places[0]
            self.plain = None
        elif index:
            places.setdefault(0, (sites.host, sites.port))
        call = RollCall(sites, door, set(self.members), places, started)
        if group is None:
            if self.leader != index:
                call.follow(self.leader, self.place)
            self.place = door.place
        self.roll_call = call

    def _own_door(self) -> Door:
        sites = self.sites
        try:
            if sites.index == 0:
                return Door.served(sites.host, sites.port)
            host = own_address(sites)
            before = self._known.places.get(sites.index)
            if before is not None and before[0] == host:
                with suppress(dist.DistError):
                    return Door.served(*before)  # where others look for it
            return Door.served(host, 0)
        except dist.DistError as error:
            raise LaunchError(
                f"sites.address = {sites.address}: port {sites.port} of {socket.gethostname()} "
                f"cannot be used: {error} -> end what uses it, or choose another port on all sites"
            ) from error

    def _gather(self, door: Door, own: Mapping[str, Any]) -> Mapping[int, Any] | None:
        """Site 0: those that start now, by site; None where others train already."""
        door.set("facts/0", own)
        while True:
            found = {n: tree for n in range(self.sites.count) if (tree := door.get(f"facts/{n}"))}
            absent = [n for n in range(self.sites.count) if n not in found]
            if not absent:
                break
            if self._others_train(door):
                return None
            if time.monotonic() > self._end:
                if self._known.is_new:
                    raise missing(self.sites, absent, "the start")
                break
            time.sleep(_PAUSE_SECONDS)
        door.set("started", {n: tree["name"] for n, tree in found.items()})
        return self._compared(door, found)

    def _come(self, own: Mapping[str, Any]) -> Mapping[int, Any] | None:
        """As `_gather`, for another site."""
        sites, failure, was_there = self.sites, "", False
        place, door = (sites.host, sites.port), None
        while True:
            try:
                if door is None:
                    door = Door.reached(place)
                    door.set(f"facts/{sites.index}", own)
                    was_there = True
                if (found := self._started(door)) is not None:
                    return self._compared(door, found)
            except dist.DistError as error:
                door, failure = None, str(error)
            if self._others_train(door):
                # Which site 0 says after those with which it has begun: this one may be of them.
                found = None if door is None else self._started(door)
                return None if door is None or found is None else self._compared(door, found)
            if time.monotonic() > self._end:
                break
            time.sleep(_PAUSE_SECONDS)
        if not self._known.is_new:
            return None
        if was_there:
            there = [n for n in range(sites.count) if door and door.has([f"facts/{n}"])]
            absent = [n for n in range(sites.count) if n not in there]
            raise missing(sites, absent, "the start")
        raise LaunchError(
            f"sites.address = {sites.address} cannot be reached from {socket.gethostname()} within "
            f"sites.timeout_seconds = {sites.timeout_seconds:g}: {failure} -> it is the host of "
            "site 0's main rank; is site 0 started, and is the port open?"
        )

    def _started(self, door: Door) -> Mapping[int, Any] | None:
        """Those with which site 0 has begun, if this one is among them."""
        started = door.get("started") or {}
        if started.get(str(self.sites.index)) != self._name:
            return None
        return {int(n): door.get(f"facts/{n}") for n in started}

    def _compared(self, door: Door, found: Mapping[int, Any]) -> Mapping[int, Any]:
        try:
            refuse_differences({site: tree["facts"] for site, tree in found.items()})
        except LaunchError:
            # All of them find out, before site 0 ends.
            with suppress(dist.DistError):
                door.set(f"refused/{self.sites.index}", True)
                end = time.monotonic() + _REFUSED_SECONDS
                keys = [f"refused/{site}" for site in found]
                while self.sites.index == 0 and not door.has(keys) and time.monotonic() < end:
                    time.sleep(_PAUSE_SECONDS)
            raise
        return found

    def _others_train(self, door: Door | None) -> bool:
        """Whether there is a group that trains; from then on this site follows its leader."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        found = []
        with suppress(dist.DistError):
            if door is not None:
                keys = ["status", *(f"card/{n}" for n in range(self.sites.count))]
                found += [door.get(key) for key in keys]
        for site, place in self._known.places.items():
            if site != self.sites.index:
                with suppress(dist.DistError):
                    found.append(Door.reached(place).get("status"))
        for status in found:
            if status is None or status["leader"] == self.sites.index or not status["place"]:
                continue
            place = place_of(status["place"])
            try:
                there = Door.reached(place)
                facts, plain = there.get("facts"), there.get("plain")
            except dist.DistError:
                continue  # that one has ended as well
            index, leader = self.sites.index, int(status["leader"])
            before = status["places"].get(str(index))
            if before is not None and place_of(before) != self._own and listens(place_of(before)):
                raise LaunchError(
                    f"site {index} trains already, at {before[0]}:{before[1]} -> end that one, or "
                    "give this one another sites.index"
                )
            refuse_differences({leader: facts, index: self._facts})
            self.leader, self.place, self.plain = leader, place, plain
            return True
        return False


def refuse_differences(by_site: Mapping[int, Facts]) -> None:
    """Raises LaunchError if a site differs from the first, listing all differences."""
    lines = []
    first = min(by_site, default=0)
    for site in sorted(by_site):
        for key in sorted({*by_site[first], *by_site[site]}):
            there, here = by_site[first].get(key), by_site[site].get(key)
            if there != here:
                lines.append(f"  {key}: {there!r} at site {first}, {here!r} at site {site}")
    if lines:
        raise LaunchError(
            "sites differ in what has to be the same -> give all of them the same settings and "
            "data:\n" + "\n".join(lines)
        )


def own_address(sites: SitesSection) -> str:
    """This host's address on the network of the rendezvous, at which other sites reach it."""
    family, _, _, _, place = socket.getaddrinfo(sites.host, sites.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def lost(place: Place, error: Exception) -> LostSiteError:
    """That a site's door does not answer."""
    return LostSiteError(f"the site at {place[0]}:{place[1]} is gone: see what it says ({error})")


def not_of_a_site(place: Place, error: Exception) -> LaunchError:
    """That something else was found at a door."""
    return LaunchError(
        f"{place[0]}:{place[1]}: what was read there was not written by a site of this version of "
        f"bigtrain ({error!r})"
    )


def missing(sites: SitesSection, absent: Sequence[int], name: str) -> LostSiteError:
    """That sites have not come to `name` in time."""
    shown = ", ".join(map(str, absent[:_MOST_NAMED])) + (", ..." * (len(absent) > _MOST_NAMED))
    return LostSiteError(
        f"site {shown} did not join {name} within sites.timeout_seconds = "
        f"{sites.timeout_seconds:g} -> see what its log says; a larger sites.timeout_seconds waits "
        "longer for a slower one"
    )
