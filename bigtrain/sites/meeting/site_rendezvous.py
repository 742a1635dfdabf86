"""Rendezvous of sites: connects ranks of different sites, beside each site's process group.

At the start they meet at the door of site 0, which is at ``sites.address``; a site that comes later
finds those that train by any door that it knows. Ranks that hold the same elements open groups
across sites, by the door of who leads. Data from other sites is JSON and bytes of tensors: nothing
of it is unpickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.engine.startup.process_group import cpu_group
from bigtrain.models.torch_patches import gloo_group
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.peers import Ranks
from bigtrain.sites.meeting.doors import Door, Place
from bigtrain.sites.meeting.roll_call import START, RollCall
from bigtrain.sites.meeting.roster import Roster
from bigtrain.sites.meeting.start import (
    Facts,
    Known,
    LostSiteError,
    Start,
    lost,
    missing,
    not_of_a_site,
    own_address,
)
from bigtrain.system.world import World

_PAUSE_SECONDS = 0.02
# A rank that ends ends the others at once; the main rank may wait long for other sites.
_RANKS_SECONDS = 7 * 86400.0

Result = TypeVar("Result")


class SiteRendezvous:
    """The other sites, for one rank of this one. Methods are collective over the sites of the
    group, `members`, but where they say otherwise.

    Entered with `join`. Errors of one rank are raised on all ranks of its site. roll_call: on the
    main rank of one of several sites. ranks: a group of this site's ranks, for the outer steps
    alone. plain: what the group that this site comes back to says under that name.
    """

    def __init__(self, sites: SitesSection, world: World, roll_call: RollCall | None) -> None:
        self.sites = sites
        self.roll_call = roll_call
        self.members: tuple[int, ...] = tuple(range(sites.count))
        self.ranks: dist.ProcessGroup | None = None
        self.plain: list[str] | None = None
        self._world = world
        self._generation = START
        self._place: Place = ("", 0)
        self._door: Door | None = None

    @classmethod
    def join(
        cls, sites: SitesSection, world: World, facts: Facts, known: Known | None = None
    ) -> SiteRendezvous:
        """Join the other sites, and compare `facts` with theirs, the same on all ranks of a site.
        Collective over all sites that start, or over this one where others train already.

        Raises LaunchError on every rank of every site that joined: if facts differ, with both
        values, or if one did not join a new run within ``sites.timeout_seconds``.
        """
        start = Start(sites, facts, known or Known())
        if sites.count > 1:
            on_all_ranks(lambda: start.enter() if world.is_main else None)
        rendezvous = cls(sites, world, start.roll_call)
        if world.size > 1:
            rendezvous.ranks = cpu_group(_RANKS_SECONDS)
        if sites.count == 1:
            return rendezvous
        said = rendezvous.on_main(lambda: (start.members, start.place, start.plain))
        rendezvous.members, rendezvous._place, rendezvous.plain = said
        return rendezvous

    @property
    def rank(self) -> int:
        """Of this process in its site."""
        return self._world.rank

    @property
    def position(self) -> int:
        """Of this site among the members."""
        return self.members.index(self.sites.index)

    @property
    def own_ranks(self) -> Ranks:
        """The ranks with this one's number, of each member."""
        return (self._world.rank,) * len(self.members)

    def on_main(self, work: Callable[[], Result]) -> Result:
        """What `work` gives on the main rank, for all ranks. Collective over this site."""
        box: list[Any] = [self.agreed(lambda: work() if self._world.is_main else None)]
        if self._world.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.ranks)
        result: Result = box[0]
        return result

    def agreed(self, work: Callable[[], Result]) -> Result:
        """What `work` gives; its error on any rank is raised on all. Collective over this site."""
        return on_all_ranks(work, self.ranks)

    def total(self, number: int) -> int:
        """The sum over the ranks of this site."""
        everyones = [number]
        if self._world.size > 1:
            everyones = [0] * self._world.size
            dist.all_gather_object(everyones, number, group=self.ranks)
        return sum(everyones)

    def regroup(self, roster: Roster) -> bool:
        """Be one of the members in `roster` from now on; whether groups have to be opened anew. Not
        collective."""
        if roster.generation == self._generation:
            return False
        self._generation, self.members = roster.generation, roster.members
        self._place = roster.place
        if self._door is not None:
            self._door.close()
        self._door = None
        return True

    def open_group(self, ranks: Ranks) -> Any:
        """A group of `ranks`, one of each member, this one among them; None for a site alone.

        Each of them must call it, and a rank in several groups for the smallest ranks first. Raises
        LostSiteError, on this rank alone, if one cannot be reached.
        """
        if len(self.members) == 1:
            return None
        timeout = timedelta(seconds=self.sites.timeout_seconds)
        try:
            prefix = f"group/{self._generation}/{'-'.join(map(str, ranks))}"
            store = dist.PrefixStore(prefix, self._reached().store)
            address = own_address(self.sites)
            return gloo_group(store, self.position, len(self.members), timeout, address)
        except RuntimeError as error:
            raise LostSiteError(
                f"rank {self._world.rank} of site {self.sites.index} cannot connect to its "
                f"counterparts (ranks {ranks} of sites {self.members}): {error} -> each host needs "
                "a connection to the hosts of the other sites, on any port"
            ) from error

    def tell(self, name: str, own: Any) -> list[list[Any]]:
        """What all ranks of all members say under `name`, JSON, by site and rank; once for each
        name and group of sites. Raises LostSiteError on all ranks of a site if another says nothing
        within ``sites.timeout_seconds``."""
        everyones: list[Any] = [own]
        if self._world.size > 1:
            everyones = [None] * self._world.size
            dist.all_gather_object(everyones, own, group=self.ranks)
        if len(self.members) == 1:
            return [everyones]
        return self.on_main(lambda: self._told(name, everyones))

    def _told(self, name: str, everyones: list[Any]) -> list[list[Any]]:
        door, prefix = self._reached(), f"told/{self._generation}/{name}"
        end = time.monotonic() + self.sites.timeout_seconds
        try:
            # A key for each rank: the store takes no values of many megabytes.
            for rank, one in enumerate(everyones):
                door.set(f"{prefix}/{self.sites.index}/{rank}", {"own": one})
            door.set(f"{prefix}/{self.sites.index}", len(everyones))
            found = []
            for site in self.members:
                key = f"{prefix}/{site}"
                while not door.has([key]):
                    if time.monotonic() > end:
                        raise missing(self.sites, [site], name)
                    time.sleep(_PAUSE_SECONDS)
                ranks = range(int(door.get(key)))
                found.append([door.get(f"{key}/{rank}")["own"] for rank in ranks])
        except dist.DistError as error:
            raise lost(self._place, error) from error
        except (ValueError, TypeError) as error:
            raise not_of_a_site(self._place, error) from error
        return found

    def offer(self, plain: list[str]) -> None:
        """What a site that comes back reads of this one. Not collective."""
        if self.roll_call is not None:
            self.roll_call.door.set("plain", plain)

    def leave(self, reason: str = "") -> None:
        """Stop: the others do not wait for this site. reason: as of `RollCall.leave`. Not
        collective."""
        if self.roll_call is not None:
            self.roll_call.leave(reason)

    def close(self) -> None:
        """Leave after the last step. Collective over this site; who leads waits until the others
        leave."""
        self.agreed(lambda: None if self.roll_call is None else self.roll_call.close())

    def _reached(self) -> Door:
        """The door of who leads, for this group of sites."""
        if self._door is None:
            try:
                self._door = Door.reached(self._place)
            except dist.DistError as error:
                raise lost(self._place, error) from error
        return self._door
