"""Who takes part in an outer step, as the main ranks of sites agree on it. Not collective.

One site leads: the others ask at its door to take part, and it answers all with one roster, when
they are there or its limit is over. A leader that is lost, or too slow, is followed by the next
site of the group. So every group that can see itself goes on, a single site as well; where two
groups see each other again, the one whose weights have seen fewer tokens asks at the other's door.

Keys of a door, beside those of `site_rendezvous`: ``status`` (who leads the site that serves it),
``card/G`` (the status of a leader G that has found this door), ``ask/I`` (site I is at an outer
step and waits), ``answer/I/ID`` (the roster for it), ``knock/I`` (site I wants to come back),
``wanted/I`` (it is waited for), ``vote/A/I`` and ``verdict/A`` of an attempt A, ``left/I``.
"""

from __future__ import annotations

import atexit
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from bigtrain.errors import TrainingError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.meeting.doors import ANSWER_SECONDS, Door, Place, listens, place_of
from bigtrain.sites.meeting.roster import Presence, Roster, agreed_roster
from bigtrain.sites.metrics import LEFT_OUT, RETURNED, OuterEvent

START = "start"
_PAUSE_SECONDS = 0.05
_WATCH_SECONDS = 0.5
_LOOK_SECONDS = 2.0
_LONGEST_REASON = 200


@dataclass(frozen=True)
class _Ask:
    """What lies at a leader's door of a site that waits. incarnation: of its process."""

    name: str
    incarnation: str
    presence: Presence


@dataclass
class _Group:
    """The sites that make outer steps together, as this one knows. seen: of the last outer step."""

    leader: int
    members: set[int]
    seen: int = 0


class RollCall:
    """One site's part in it.

    members: the sites that this one begins with; started: of those that start together, by site a
    name of the start, with groups of the generation `START`. places: the doors of sites, as far as
    they are known. is_away: whether the leader is further than this site, which trains for itself
    until it is called. door: of this site.
    """

    def __init__(
        self,
        sites: SitesSection,
        door: Door,
        members: set[int],
        places: Mapping[int, Place],
        started: Mapping[int, str] | None = None,
    ) -> None:
        self._site = sites.index
        self._limit = sites.timeout_seconds
        # What the limit leaves for a second try, after the leader did not come.
        self._spare = min(ANSWER_SECONDS, self._limit / 8)
        self._others = set(range(sites.count)) - {self._site}
        self.door = door
        self.is_away = False
        self._places: dict[int, Place] = {}
        self._group = _Group(min(members), set(members))
        started = started or {}
        self._incarnation = started.get(self._site, secrets.token_hex(6))
        self._generation: tuple[object, str] | None = None
        if started and self._group.leader == self._site:
            names = tuple(started[site] for site in sorted(started) if site != self._site)
            self._generation = (tuple(sorted(started)), names), START
        self._visits: dict[int, Door] = {}
        self._asked_since: float | None = None
        self._better: tuple[int, Place] | None = None
        self._last_verdict = ""
        self._events: list[OuterEvent] = []
        self._num_undecided = 0
        self._incarnations: dict[int, str] = {}  # of those in the last roster
        self._refused: dict[int, str] = {}  # incarnations that sent what no outer step may use
        self._ended = threading.Event()
        self._know(places)
        self._tell_status()
        self._watcher = threading.Thread(target=self._watch, name="roll call", daemon=True)
        self._watcher.start()
        # Python ends threads that wait for a store in a way that aborts the process.
        atexit.register(self.end)

    @property
    def places(self) -> dict[int, Place]:
        """The doors that are known, this one among them."""
        return dict(self._places)

    @property
    def leader(self) -> int:
        """The site at whose door this one asks."""
        return self._group.leader

    def follow(self, leader: int, place: Place) -> None:
        """Ask at the door of another group's leader from now on."""
        self._know({leader: place})
        self._forget_visit(leader)
        self._group = _Group(leader, {leader, self._site}, self._group.seen)
        self._better = None
        self._tell_status()

    def gather(self, presence: Presence, *, is_patient: bool = False) -> Roster | None:
        """The roster for an outer step at which this site is now, or None where its leader is
        further, and made no other in time: this site is away then, until it `is_called`.

        Takes some seconds more than the limit at most, and ends sooner where sites have ended.
        is_patient: wait for a leader as long as it is there, for nothing is trained meanwhile.
        """
        self._group.seen = presence.seen
        begun = time.monotonic()
        deadline = begun + self._limit - self._spare
        while True:
            if (better := self._better) is not None and self.leader == self._site:
                self.follow(*better)
            found: Roster | str | None = ""
            if self.leader == self._site:
                found = self._lead(presence, begun) or ""
            else:
                found = self._ask(presence, deadline, is_patient=is_patient)
            if found is None or isinstance(found, Roster):
                self.is_away = found is None
                return found
            if found:
                self._succeed(found)
                deadline = max(deadline, time.monotonic() + self._spare)

    def decide(self, roster: Roster, *, is_done: bool, unusable: int | None = None) -> bool:
        """Whether all members of an attempt have done their part, on all of them: then it counts.

        is_done: whether this one has. unusable: the site whose values it cannot use, which the
        leader leaves out then until that site is started again; raises TrainingError on the leader
        if that is the leader.
        """
        if len(roster.members) == 1:
            self._count(roster, is_done=is_done)
            return is_done
        vote, verdict = (f"{name}/{roster.attempt}" for name in ("vote", "verdict"))
        if roster.leader != self._site:
            try:
                door = self._visit(roster.leader)
                own = is_done if unusable is None else {"unusable": unusable}
                door.set(f"{vote}/{self._site}", own)
                end = time.monotonic() + 2 * self._limit
                while (found := door.get(verdict)) is None and time.monotonic() < end:
                    time.sleep(_PAUSE_SECONDS)
            except (dist.DistError, ValueError):
                found = None
            self._count(roster, is_done=bool(found))
            return bool(found)
        votes = {self._site: is_done}
        blamed = set() if unusable is None else {unusable}
        end = time.monotonic() + self._limit
        missing, looked = set(roster.members) - votes.keys(), time.monotonic()
        while missing and time.monotonic() < end:
            for site in sorted(missing):
                if (one := self.door.get(f"{vote}/{site}")) is not None:
                    votes[site] = one is True
                    if isinstance(one, dict) and one.get("unusable") in roster.members:
                        blamed.add(int(one["unusable"]))
                    self.door.delete(f"{vote}/{site}")
            missing -= votes.keys()
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                missing -= {site for site in missing if self._is_gone(site)}
            time.sleep(_PAUSE_SECONDS)
        committed = len(votes) == len(roster.members) and all(votes.values())
        self.door.set(verdict, committed)
        self.door.delete(self._last_verdict)  # which all that are here have read
        self._last_verdict = verdict
        self._count(roster, is_done=committed)
        if not committed:
            self._drop(roster, votes, blamed)
        return committed

    def is_called(self) -> bool:
        """Of a site that is away or alone: whether it is waited for by a group to come back to."""
        if (better := self._better) is not None and self.leader == self._site:
            self.follow(*better)
            self.is_away = True
        if self.leader == self._site:
            return False
        try:
            if self._visit(self.leader).has([f"wanted/{self._site}"]):
                return True
            self._visit(self.leader).set(f"knock/{self._site}", self._card())
        except dist.DistError:
            self._forget_visit(self.leader)
            self._group = _Group(self._site, {self._site}, self._group.seen)
            self.is_away = False
            self._tell_status()
        return False

    def end(self) -> None:
        """Look for nobody any longer."""
        self._ended.set()
        self._watcher.join(2 * ANSWER_SECONDS)
        atexit.unregister(self.end)

    def leave(self, reason: str = "") -> None:
        """This site stops: it is not waited for any longer. reason: that the others are told, where
        it is not that it has trained to its end."""
        self.end()
        if self.leader != self._site:
            with suppress(dist.DistError):
                self._visit(self.leader).set(f"left/{self._site}", {"reason": reason})

    def close(self) -> None:
        """Leave after the last step; who leads waits for the others of its group to do so, that
        none of them reads from a door that is gone."""
        self.leave()
        end = time.monotonic() + self._limit
        if self.leader == self._site:
            absent = self._group.members - {self._site}
            while absent and time.monotonic() < end:
                absent = {site for site in absent if not self._is_gone(site)}
                time.sleep(4 * _PAUSE_SECONDS)
        for site in list(self._visits):
            self._forget_visit(site)

    def _lead(self, presence: Presence, begun: float) -> Roster | None:
        """The roster of those that ask in time; None where a better group is found meanwhile."""
        expected = self._group.members - {self._site}
        looked, least = time.monotonic() - 0.5, time.monotonic() + self._spare
        self._tell_status(is_open=True)
        while self._better is None:
            asks = self._asks()
            self._call(asks, expected)
            now = time.monotonic()
            if now - looked > 1 and (absent := expected - asks.keys()):
                looked = now
                expected -= {site for site in absent if self._is_gone(site)}
            # The limit is of the first to come, which may have been another one.
            end = min(begun, self._asked_since or begun) + self._limit - 2 * self._spare
            if expected <= asks.keys() or now > max(end, least):
                return self._answered(presence, asks)
            time.sleep(_PAUSE_SECONDS)
        self._tell_status()
        return None

    def _answered(self, own: Presence, asks: dict[int, _Ask]) -> Roster:
        for site in asks.keys() - self._group.members:  # it may have asked long ago
            if not listens(self._places[site]):
                self.door.delete(f"ask/{site}")
                del asks[site]
        present = {self._site: own, **{site: ask.presence for site, ask in asks.items()}}
        key = tuple(sorted(present)), tuple(asks[site].incarnation for site in sorted(asks))
        if self._generation is None or self._generation[0] != key:
            self._generation = key, secrets.token_hex(6)
        roster = agreed_roster(present, self._site, self.door.place, self._generation[1])
        roster = replace(roster, events=tuple(self._happened(roster)))
        tree = asdict(roster)
        self._incarnations = {site: ask.incarnation for site, ask in asks.items()}
        for site, ask in asks.items():
            self.door.set(f"answer/{site}/{ask.name}", tree)
            for name in ("ask", "wanted", "knock", "left"):
                self.door.delete(f"{name}/{site}")
        self._asked_since = None
        self._tell_status()
        return roster

    def _asks(self) -> dict[int, _Ask]:
        found = {}
        for site in self._others:
            with suppress(ValueError, TypeError, KeyError):
                if ask := self.door.get(f"ask/{site}"):
                    presence = Presence.from_json(site, ask["presence"])
                    asked = _Ask(str(ask["id"]), str(ask["incarnation"]), presence)
                    if self._refused.get(site) == asked.incarnation:
                        continue
                    self._know({site: place_of(ask["place"])})
                    found[site] = asked
        return found

    def _call(self, asks: Mapping[int, _Ask], expected: set[int]) -> None:
        """Wait for those that have knocked since, as well."""
        for site in self._others - asks.keys() - expected:
            with suppress(ValueError, TypeError, KeyError):
                if not (card := self.door.get(f"knock/{site}")):
                    continue
                if self._refused.get(site) == card["incarnation"]:
                    continue
                self._know({site: place_of(card["place"])})
                self.door.set(f"wanted/{site}", True)
                self.door.delete(f"knock/{site}")
                expected.add(site)

    def _happened(self, roster: Roster) -> list[OuterEvent]:
        """To the sites of this group since its last outer step."""
        number = roster.number
        found, self._events = [replace(e, outer_step=number) for e in self._events], []
        told, before = {event.who for event in found}, self._group.members
        for site in sorted(before - set(roster.members)):
            if f"site {site}" not in told:
                left = self.door.get(f"left/{site}")
                reason = str(left.get("reason") or "") if isinstance(left, dict) else ""
                reason = reason[:_LONGEST_REASON] or "missed the outer step"
                found.append(OuterEvent(LEFT_OUT, f"site {site}", reason, number))
        for site in roster.members:
            if site in roster.takers or site not in before:
                does = "takes the global weights" if site in roster.takers else "takes part again"
                found.append(OuterEvent(RETURNED, f"site {site}", does, number))
        return found

    def _ask(self, presence: Presence, deadline: float, *, is_patient: bool) -> Roster | str | None:
        """The leader's roster; None if it is further, and has made none in time; "" if another is
        to be asked; else why it does not lead any longer."""
        leader, name, is_extended = self.leader, secrets.token_hex(6), False
        key, answer = f"ask/{self._site}", f"answer/{self._site}/{name}"
        ask = {**self._card(), "id": name, "presence": asdict(presence)}
        try:
            door = self._visit(leader)
            door.set(key, ask)
            while True:
                status = door.get("status") or self._status()  # that one just begins
                is_late = time.monotonic() > deadline and not is_patient
                if is_late and status.get("is_open") and not is_extended:
                    deadline, is_extended = time.monotonic() + 2 * self._spare, True
                    continue
                if is_late or status["leader"] != leader:
                    door.delete(key)
                if (tree := door.get(answer)) is not None:
                    door.delete(answer)
                    return Roster.from_json(tree)
                if status["leader"] != leader:
                    self.follow(int(status["leader"]), place_of(status["place"]))
                    return ""
                self._know({int(n): place_of(place) for n, place in status["places"].items()})
                if is_late and status["seen"] <= presence.seen:
                    return "did not come to the outer step"
                if is_late:
                    door.set(f"knock/{self._site}", self._card())
                    return None
                time.sleep(_PAUSE_SECONDS)
        except dist.DistError:
            self._forget_visit(leader)
            return "cannot be reached"
        except (ValueError, TypeError, KeyError):
            return "says what no site of this version of bigtrain does"

    def _succeed(self, reason: str) -> None:
        """Follow the next one of the group, after its leader was lost."""
        lost = self.leader
        self._events.append(OuterEvent(LEFT_OUT, f"site {lost}", reason, 0))
        self._group.members.discard(lost)
        self._group.leader = min(self._group.members)
        self._tell_status()

    def _drop(self, roster: Roster, votes: Mapping[int, bool], blamed: set[int]) -> None:
        """After an attempt that failed: leave out who is lost, or `blamed` for values that no outer
        step may use. Where all are there, and some cannot reach each other, those go in turn."""
        if blamed:
            self._refuse(roster, blamed)
            return
        lost = set(roster.members) - votes.keys()
        refused = [site for site, is_done in votes.items() if not is_done and site != self._site]
        self._num_undecided = 0 if lost else self._num_undecided + 1
        if self._num_undecided > 1 and refused:
            lost, self._num_undecided = {max(refused)}, 0
        for site in sorted(lost):
            reason = "was lost during the exchange"
            self._events.append(OuterEvent(LEFT_OUT, f"site {site}", reason, roster.number))
        self._group.members -= lost
        self._generation = None

    def _refuse(self, roster: Roster, blamed: set[int]) -> None:
        """Make no outer step with these sites, as long as their processes run."""
        if self._site in blamed:
            raise TrainingError(
                f"site {self._site} sent the other sites values that are not finite, or moved too "
                "far: it ends -> start it again: it resumes from its newest checkpoint"
            )
        for site in sorted(blamed):
            self._refused[site] = self._incarnations.get(site, "")
            reason = "sent values that are not finite, or moved too far"
            self._events.append(OuterEvent(LEFT_OUT, f"site {site}", reason, roster.number))
        self._group.members -= blamed
        self._generation = None

    def _count(self, roster: Roster, *, is_done: bool) -> None:
        """Take over what a roster says, after its attempt."""
        group = self._group
        if is_done:
            self._group = _Group(roster.leader, set(roster.members), roster.seen)
            self._num_undecided = 0
            self._events.clear()  # of a time when this site did not lead
        else:
            self._group = replace(group, members=group.members | set(roster.members))
        if roster.leader != self._site:
            self._generation = None
        self._tell_status()

    def _is_gone(self, site: int) -> bool:
        """Whether a site that is waited for has ended."""
        place = self._places.get(site)
        has_left = self.door.has([f"left/{site}"])
        return has_left or (place is not None and not listens(place))

    def _card(self) -> dict[str, Any]:
        return {"place": self.door.place, "incarnation": self._incarnation}

    def _know(self, places: Mapping[int, Place]) -> None:
        """Where doors are; that of this site it knows best."""
        changed = {site for site, place in places.items() if self._places.get(site) != place}
        changed -= {self._site} & self._places.keys()
        for site in changed:
            self._forget_visit(site)
            self._places[site] = places[site]

    def _visit(self, site: int) -> Door:
        if site not in self._visits:
            if site not in self._places:
                raise dist.DistNetworkError(f"site {site} has no door that is known")
            self._visits[site] = Door.reached(self._places[site])
        return self._visits[site]

    def _forget_visit(self, site: int) -> None:
        if (door := self._visits.pop(site, None)) is not None:
            door.close()

    def _tell_status(self, *, is_open: bool = False) -> None:
        """is_open: whether an outer step is being agreed on."""
        self.door.set("status", {**self._status(), "is_open": is_open})

    def _status(self) -> dict[str, Any]:
        group = self._group
        place = self.door.place if group.leader == self._site else self._places.get(group.leader)
        return {
            "leader": group.leader,
            "place": place,
            "seen": group.seen,
            "size": len(group.members),
            "places": self.places,
        }

    def _watch(self) -> None:
        """Until this site leaves: see when others ask, and look for other groups."""
        looked = time.monotonic()
        while not self._ended.wait(_WATCH_SECONDS):
            with suppress(dist.DistError, ValueError, TypeError, KeyError):
                if self.leader != self._site:
                    self._asked_since = None
                    continue
                if self._asked_since is None and any(
                    self.door.has([f"ask/{site}"]) for site in self._others
                ):
                    self._asked_since = time.monotonic()
                for site in self._others:  # of this group one that has gone on without this site
                    if (card := self.door.get(f"card/{site}")) is not None:
                        self.door.delete(f"card/{site}")  # of one that may end
                        self._consider(card)
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    for site in (self._others - self._group.members) & self._places.keys():
                        self._look_at(site)

    def _look_at(self, site: int) -> None:
        """See whether a site that was lost is there, and tell it of this group."""
        with suppress(dist.DistError):
            door = Door.reached(self._places[site])
            try:
                status = door.get("status")
                if status is not None and status["leader"] not in self._group.members:
                    self._consider(status)
                door.set(f"card/{self._site}", self._status())
            finally:
                door.close()

    def _consider(self, status: Mapping[str, Any]) -> None:
        """Another group: the one with more seen tokens, sites, or the smaller leader stays."""
        leader, seen, size = (int(status[name]) for name in ("leader", "seen", "size"))
        own = self._group
        theirs = seen, size, -leader
        if leader in self._others and theirs > (own.seen, len(own.members), -own.leader):
            self._better = leader, place_of(status["place"])
