"""Rounds of the direct exchange: sites enter, get one plan, and vote; no tensor passes here.

A round is open from its plan to its verdict, one at a time. It counts if all members have voted
that their transfers are done, in one transaction; else it never was, and its members enter again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bigtrain.sites import protocol
from bigtrain.sites.metrics import LEFT_OUT
from bigtrain.sites.protocol import Header, RefusedError, RoundEntry, RoundPlan, StepRecord
from bigtrain.sites.server.members import UNUSABLE, Members, as_events, site_names
from bigtrain.sites.server.plan import Waiting, due, plan_round, round_events
from bigtrain.sites.server.store import EventKey, SiteRow

_MOST_VALUES_BYTES = 64 << 20
"""Limit of the key/value store of a generation."""
_MOST_SKIPPED_STEPS = 64

Reply = tuple[Header, bytes]


@dataclass
class _OpenRound:
    """A plan until its verdict.

    tokens: by site in the mean. reported_events: events that the plan contains. absent: sites that
    are not waited for after it. votes: by site, whether its transfers are done. blamed: sites that
    sent values which no site can use. first_vote: seconds of the clock.
    """

    plan: RoundPlan
    tokens: dict[int, int]
    reported_events: Counter[EventKey]
    absent: set[int]
    votes: dict[int, bool] = field(default_factory=dict)
    blamed: set[int] = field(default_factory=set)
    first_vote: float | None = None


class DirectExchange:
    """The entries, the open round and the key/value store of a run."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._store = members.store
        self._waiting: dict[int, Waiting] = {}
        self._plans: dict[int, RoundPlan] = {}  # by site, for its entry in `_planned_entries`
        self._planned_entries: dict[int, str] = {}
        self._open_round: _OpenRound | None = None
        self._aborted_plan: RoundPlan | None = None
        # Processes of the sites whose groups of ranks are open, and the id of these groups.
        self._incarnations: tuple[tuple[int, str, int], ...] = ()
        self._generation = ""
        self._values: dict[str, bytes] = {}  # of the generation
        self._num_unexplained = 0  # aborted rounds in a row without a lost or a blamed site
        # Sites that cannot reach other sites: the last outer step without them, and how often.
        self._excluded_until: dict[int, int] = {}
        self._num_exclusions: Counter[int] = Counter()
        self.handlers: dict[str, Callable[[Any, memoryview], Reply]] = {
            "layout": self._layout,
            "layout_of": self._layout_of,
            "enter": self._enter,
            "vote": self._vote,
            "put": self._put,
            "get": self._get,
        }

    # Requests

    def joined(self, request: protocol.JoinRequest) -> Header:
        """Withdraw the entry and the vote of an earlier start of the site."""
        self._withdraw(request.site)
        is_stored = not request.layout or self._store.layout(request.layout) is not None
        return {"uploads": False, "needs_layout": not is_stored}

    def left(self, site: int, reason: str) -> None:
        """Continue without a site."""
        self._withdraw(site)
        if not reason:
            self._members.note(LEFT_OUT, f"site {site}", "left")

    def _layout(self, request: protocol.LayoutRequest, document: memoryview) -> Reply:
        """Store the layout document of a site."""
        digest = protocol.digest_of(document)
        with self._members.changed:
            self._store.write_layout(digest, document)
            self._store.write_site(replace(self._members.member(request.site), layout=digest))
        return {}, b""

    def _layout_of(self, request: protocol.LayoutOfRequest, _: memoryview) -> Reply:
        """Return the layout document of another site."""
        digest = self._members.member(request.of_site).layout
        document = self._store.layout(digest or "-")  # no document has this name
        if document is None:
            raise RefusedError(f"site {request.of_site} has not sent its layout")
        return {}, document

    def _enter(self, entry: RoundEntry, _: memoryview) -> Reply:
        """Count a site as waiting at an outer step; return the plan once there is one."""
        site = entry.site

        def plan() -> Header | None:
            self._refuse_blamed(self._members.member(site))
            if self._planned_entries.get(site) == entry.entry:
                return {"is_ready": True, "plan": self._plans[site].model_dump(mode="json")}
            waiting = self._waiting.get(site)
            is_waiting = waiting is not None and waiting.entry.entry == entry.entry
            # Else a new process of the site has withdrawn the entry: end the poll.
            return None if is_waiting else self._missing()

        with self._members.changed:
            self._add_entry(entry)
        return self._members.poll(plan, entry.seconds) or self._missing(), b""

    def _add_entry(self, entry: RoundEntry) -> None:
        """Count a site as waiting, in place of its earlier entry. Raises RefusedError."""
        site, row = entry.site, self._members.member(entry.site)
        self._refuse_blamed(row)
        waiting = self._waiting.get(site)
        is_waiting = waiting is not None and waiting.entry.entry == entry.entry
        if is_waiting or self._planned_entries.get(site) == entry.entry:
            return  # a repeated request
        if row.layout and self._store.layout(row.layout) is None:
            raise RefusedError(f"site {site} has not sent its layout")
        self._withdraw(site)
        if not row.is_active:
            self._store.write_site(replace(row, is_active=True))
        self._waiting[site] = Waiting(entry, self._members.clock())
        self._members.attempt(self.tick)

    def _missing(self) -> Header:
        """Return the reply to a site whose round is not planned yet."""
        with self._members.changed:
            is_new = self._is_new()
            awaited = range(self._num_sites()) if is_new else self._expected()
            missing = sorted(set(awaited) - self._waiting.keys())
            refused = self._members.refused
            reasons = {str(site): refused[site] for site in missing if site in refused}
            return {"is_ready": False, "missing": missing, "refused": reasons, "is_new": is_new}

    def _vote(self, request: protocol.VoteRequest, _: memoryview) -> Reply:
        """Count the result of a site's transfers; return the verdict once there is one."""
        attempt, site, unusable = request.attempt, request.site, request.unusable
        with self._members.changed:
            current, aborted = self._open_round, self._aborted_plan
            if current is not None and current.plan.attempt == attempt:
                self._count_vote(current, site, request.is_done)
                if unusable in current.plan.members and site in current.plan.members:
                    current.blamed.add(unusable)
            elif aborted is not None and aborted.attempt == attempt:  # a vote after the verdict
                if unusable in aborted.members and site in aborted.members:
                    self._exclude({unusable})
            self._members.attempt(self.tick)
        return self.verdict(attempt, request.seconds), b""

    def verdict(self, attempt: str, seconds: float) -> Header:
        """Return whether an attempt counts, once that is decided."""

        def ready() -> Header | None:
            if self._open_round is not None and self._open_round.plan.attempt == attempt:
                return None
            return {"is_decided": True, "is_committed": self._store.is_committed(attempt)}

        undecided = {"is_decided": False, "is_committed": False}
        return self._members.poll(ready, seconds) or undecided

    def _put(self, request: protocol.PutRequest, payload: memoryview) -> Reply:
        """Store a value for the members of a generation."""
        key, size = request.key, len(payload)
        with self._members.changed:
            self._refuse_other_generation(request.generation)
            if size > protocol.MOST_VALUE_BYTES:
                raise RefusedError(
                    f"a value of {size} bytes, of at most {protocol.MOST_VALUE_BYTES}"
                )
            num_other_bytes = sum(len(k) + len(v) for k, v in self._values.items() if k != key)
            if num_other_bytes + len(key) + size > _MOST_VALUES_BYTES:
                raise RefusedError(f"more than {_MOST_VALUES_BYTES} bytes of values")
            self._values[key] = bytes(payload)
            self._members.changed.notify_all()
        return {}, b""

    def _get(self, request: protocol.GetRequest, _: memoryview) -> Reply:
        """Return a value of a generation, once it is there."""

        def ready() -> bytes | None:
            self._refuse_other_generation(request.generation)
            return self._values.get(request.key)

        value = self._members.poll(ready, request.seconds)
        return {"is_there": value is not None}, value or b""

    # Rounds

    def tick(self) -> None:
        """Decide the open round and begin the next round, each if it is due."""
        if self._open_round is not None:
            self._decide(self._open_round)
        if self._open_round is not None:
            return
        expected, is_new = self._expected(), self._is_new()
        waiting = {site: waiting for site, waiting in self._waiting.items() if site in expected}
        window, now = self._members.rules.window_seconds, self._members.clock()
        if due(waiting, expected, self._num_sites(), is_new=is_new, window_seconds=window, now=now):
            entries = {site: site_waiting.entry for site, site_waiting in waiting.items()}
            self._begin_round(entries, is_new=is_new)

    def _begin_round(self, entries: dict[int, RoundEntry], *, is_new: bool) -> None:
        """Plan a round of sites by their entries, and open it unless the plan is a refusal."""
        # Groups of ranks stay open while no site is added, lost or started again.
        rows, last = self._store.sites(), self._store.record()
        incarnations = tuple((s, rows[s].run, rows[s].num_joins) for s in sorted(entries))
        if self._incarnations != incarnations:
            self._incarnations, self._generation = incarnations, secrets.token_hex(8)
            self._values = {}
        # The plan, with the events since the last outer step. What any site sends in float32, all
        # sites do.
        plain = set().union(*(json.loads(row.plain) for row in rows.values()))
        plan = plan_round(
            entries,
            last,
            is_new=is_new,
            generation=self._generation,
            layouts={site: rows[site].layout for site in sorted(entries)},
            plain=sorted(plain),
        )
        reported = self._members.pending()
        last_members = set(plan.members if last is None else last["members"])
        events = round_events(plan, as_events(reported, plan.number), last_members)
        plan = plan.model_copy(update={"events": events})
        for site, entry in entries.items():
            self._plans[site], self._planned_entries[site] = plan, entry.entry
            del self._waiting[site]
        if plan.refusal:
            self._members.log(f"no outer step with {site_names(plan.members)}: {plan.refusal}")
        else:
            newest = max(entry.number for entry in entries.values())
            if last is not None and newest < int(last["number"]):
                self._members.log(
                    f"outer step {last['number']} is on none of the sites that are here: they "
                    f"continue from {newest}, which becomes {plan.number}"
                )
            tokens = {site: entry.tokens for site, entry in entries.items() if site in plan.sites}
            active = {site for site, row in rows.items() if row.is_active}
            absent = active - set(plan.members) - self._waiting.keys()
            self._open_round = _OpenRound(plan, tokens, reported, absent)
        self._members.changed.notify_all()

    def _decide(self, current: _OpenRound) -> None:
        """Commit or abort the open round, once all members that are alive have voted."""
        plan, votes, now = current.plan, current.votes, self._members.clock()
        silent = set(plan.members) - votes.keys()
        if not silent and all(votes.values()) and not current.blamed:
            self._commit(current)
            return
        lost_sites = {site for site in silent if not self._members.is_alive(site)}
        if lost_sites:
            self._end_generation()
        rows = self._store.sites()
        timeout = max(rows[site].timeout_seconds for site in plan.members)
        has_timed_out = current.first_vote is not None and now - current.first_vote >= timeout
        if has_timed_out or silent == lost_sites:  # all members that are alive have voted
            self._abort(current, silent)

    def _commit(self, current: _OpenRound) -> None:
        """Store the outer step of the open round, and end the round."""
        plan = current.plan
        record = {
            **plan.model_dump(mode="json", include=set(StepRecord.model_fields)),
            "tokens": {str(site): count for site, count in current.tokens.items()},
            "time": time.time(),
        }
        self._members.write_step(
            record, current.reported_events, plan.members, current.absent, attempt=plan.attempt
        )
        self._open_round, self._num_unexplained = None, 0
        for site in plan.members:
            self._excluded_until.pop(site, None)
            self._num_exclusions.pop(site, None)
        if plan.fragment is None:
            self._members.log(f"{site_names(plan.members)} begin at outer step {plan.number}")
        else:
            self._members.log(f"outer step {plan.number} with {site_names(plan.sites)}")

    def _abort(self, current: _OpenRound, silent: set[int]) -> None:
        """End the open round without effect; exclude sites for which it failed."""
        plan = current.plan
        failed = {site for site, is_done in current.votes.items() if not is_done}
        if current.blamed:
            reason = f"{site_names(current.blamed)} {UNUSABLE}"
        else:
            reason = (
                f"{site_names(silent)} was lost" if silent else f"failed for {site_names(failed)}"
            )
        self._open_round, self._aborted_plan = None, plan
        self._end_generation()  # whose groups are broken
        self._members.log(f"no outer step with {site_names(plan.members)}: {reason}")
        self._members.changed.notify_all()
        for site in sorted(silent):
            self._members.note(LEFT_OUT, f"site {site}", "was lost during the exchange")
        self._exclude(current.blamed)
        self._num_unexplained = 0 if silent or current.blamed else self._num_unexplained + 1
        if self._num_unexplained > 1 and len(plan.members) > 1:
            # All members are alive, and some cannot reach each other: exclude one member, for
            # twice as many outer steps each time.
            site, self._num_unexplained = max(failed), 0
            self._num_exclusions[site] += 1
            num_steps = min(2 ** self._num_exclusions[site], _MOST_SKIPPED_STEPS)
            self._excluded_until[site] = plan.number - 1 + num_steps
            self._members.note(LEFT_OUT, f"site {site}", "cannot reach the others")

    def _exclude(self, blamed: Iterable[int]) -> None:
        """Make no round with the `blamed` sites until they join again."""
        for site in sorted(blamed):
            text = (
                f"site {site} {UNUSABLE}: it ends -> start it again: it resumes from its newest "
                "checkpoint"
            )
            row = self._members.member(site)
            self._store.write_site(replace(row, refused=text, is_active=False))
            self._waiting.pop(site, None)
            self._members.note(LEFT_OUT, f"site {site}", UNUSABLE)
            self._members.log(f"site {site} is excluded: it {UNUSABLE}")

    def _expected(self) -> Mapping[int, SiteRow]:
        """Return the sites that take part in the next round, which waits until they have
        entered."""
        record = self._store.record()
        number = 0 if record is None else int(record["number"])
        alive = {
            site: row
            for site, row in self._store.sites().items()
            if row.is_active and not row.refused and self._members.is_alive(site)
        }
        excluded = {site for site, until in self._excluded_until.items() if until > number}
        included = {site: row for site, row in alive.items() if site not in excluded}
        return included or alive

    def _is_new(self) -> bool:
        """Return whether no outer step was made, and no waiting site is from a checkpoint."""
        entries = [waiting.entry for waiting in self._waiting.values()]
        return self._store.record() is None and not any(entry.number for entry in entries)

    def _num_sites(self) -> int:
        """Return the number of sites of the run; 0 before a site has joined."""
        run = self._store.run()
        return 0 if run is None else int(run["sites"]["count"])

    def _withdraw(self, site: int) -> None:
        """Withdraw a site's entry; if it has not voted in the open round, count a vote against."""
        self._waiting.pop(site, None)
        self._planned_entries.pop(site, None)
        self._plans.pop(site, None)
        if self._open_round is not None:
            self._open_round.absent.discard(site)
            self._count_vote(self._open_round, site, is_done=False)

    def _count_vote(self, current: _OpenRound, site: int, is_done: bool) -> None:
        """Count the first vote of a member."""
        if site in current.plan.members:
            if current.first_vote is None:
                current.first_vote = self._members.clock()
            if not current.votes.setdefault(site, is_done):
                self._end_generation()

    def _end_generation(self) -> None:
        """Refuse `get` and `put` of a round that fails: other members may wait there for a site
        that has voted against it, or is lost."""
        if self._generation:
            self._incarnations, self._generation = (), ""
            self._members.changed.notify_all()

    def _refuse_blamed(self, row: SiteRow) -> None:
        if row.refused:
            raise RefusedError(row.refused)

    def _refuse_other_generation(self, generation: str) -> None:
        if generation != self._generation:
            raise RefusedError("the round of this generation is over")
