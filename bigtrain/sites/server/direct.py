"""Rounds of the direct exchange: sites enter, get one plan, and vote; no tensor passes here.

A round is open from its plan to its verdict, one at a time. It counts if all members have voted
that their transfers are done, in one transaction; else it never was, and its members enter again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bigtrain.sites.metrics import LEFT_OUT
from bigtrain.sites.protocol import (
    MOST_VALUE_BYTES,
    Header,
    RefusedError,
    RoundEntry,
    RoundPlan,
    digest_of,
)
from bigtrain.sites.server.members import UNUSABLE, EventKey, Members, events_of, named
from bigtrain.sites.server.plan import Waiting, due, plan_round, round_events
from bigtrain.sites.server.store import SiteRow

_MOST_VALUES_BYTES = 64 << 20
"""Limit of the key/value store of a generation."""
_MOST_SKIPPED = 64


@dataclass
class _OpenRound:
    """A plan until its verdict.

    tokens: by site in the mean. told: events that the plan contains. absent: sites that are not
    waited for after it. blamed: for values that nobody can use. first_vote: seconds of the clock.
    """

    plan: RoundPlan
    tokens: dict[int, int]
    told: Counter[EventKey]
    absent: set[int]
    votes: dict[int, bool] = field(default_factory=dict)
    blamed: set[int] = field(default_factory=set)
    first_vote: float | None = None

    def vote(self, site: int, is_done: bool, now: float) -> None:
        """Count the first vote of a member."""
        if site in self.plan.members:
            self.votes.setdefault(site, is_done)
            self.first_vote = now if self.first_vote is None else self.first_vote


class DirectExchange:
    """The entries, the open round and the key/value store of a run."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._store = members.store
        self._waiting: dict[int, Waiting] = {}
        self._plans: dict[int, tuple[str, RoundPlan]] = {}  # by site: entry, and its plan
        self._open: _OpenRound | None = None
        self._aborted: RoundPlan | None = None
        self._incarnations: tuple[Any, str] = ((), "")  # incarnations, and their generation
        self._values: dict[str, bytes] = {}
        self._num_undecided = 0
        self._skipped: dict[int, tuple[int, int]] = {}  # by site: until which number, how often

    # Requests

    def act(
        self, action: str, header: Header, payload: memoryview, body: bytes | bytearray
    ) -> tuple[Header, bytes]:
        """Return header and payload of the reply to a request."""
        site, attempt = header["site"], header.get("attempt", "")
        generation, key = header.get("generation", ""), header.get("key", "")
        if action == "layout":
            self.layout(site, payload)
        elif action == "layout_of":
            return {}, self.layout_of(header["of_site"])
        elif action == "enter":
            self.enter(RoundEntry.model_validate(header))
        elif action == "plan":
            return self.plan(site, header["entry"], header["seconds"]), b""
        elif action == "vote":
            self.vote(site, attempt, header["is_done"], header.get("unusable"))
        elif action == "verdict":
            return self.verdict(attempt, header["seconds"]), b""
        elif action == "put":
            self.put(generation, key, bytes(payload))
        elif action == "get":
            value = self.get(generation, key, header["seconds"])
            return {"is_there": value is not None}, value or b""
        else:
            raise RefusedError(
                f"{action}: the sites of this run have sites.exchange = direct, not server"
            )
        return {}, b""

    def joined(self, site: int, request: Header) -> Header:
        """Forget what an earlier start of the site was about."""
        self._detach(site)
        digest = request.get("layout") or ""
        is_stored = not digest or self._store.layout(digest) is not None
        return {"uploads": False, "needs_layout": not is_stored}

    def left(self, site: int, reason: str) -> None:
        """Continue without a site."""
        self._detach(site)
        if not reason:
            self._members.note(LEFT_OUT, f"site {site}", "left")

    def layout(self, site: int, document: memoryview) -> None:
        """Store the layout document of a site, instead of one before it."""
        digest = digest_of(bytes(document))
        with self._members.changed:
            self._store.write_layout(digest, document)
            self._store.write_site(replace(self._members.row(site), layout=digest))

    def layout_of(self, site: int) -> bytes:
        """Return the layout document of a site."""
        document = self._store.layout(self._members.row(site).layout or "-")
        if document is None:
            raise RefusedError(f"site {site} has not sent its layout")
        return document

    def enter(self, entry: RoundEntry) -> None:
        """Count a site as waiting at an outer step."""
        with self._members.changed:
            site, row = entry.site, self._members.row(entry.site)
            self._refuse_blamed(row)
            waiting, planned = self._waiting.get(site), self._plans.get(site)
            known = {waiting.entry.entry} if waiting else set()
            if entry.entry in known | ({planned[0]} if planned else set()):
                return
            if row.layout and self._store.layout(row.layout) is None:
                raise RefusedError(f"site {site} has not sent its layout")
            self._detach(site)
            if not row.is_active:
                self._store.write_site(replace(row, is_active=True))
            self._waiting[site] = Waiting(entry, self._members.clock())
            self._members.attempt(self.tick)

    def plan(self, site: int, entry: str, seconds: float) -> Header:
        """Return the plan of an entry, once there is one."""

        def ready() -> Header | None:
            self._refuse_blamed(self._members.row(site))
            planned, waiting = self._plans.get(site), self._waiting.get(site)
            if planned is not None and planned[0] == entry:
                return {"is_ready": True, "plan": planned[1].to_json()}
            if waiting is None or waiting.entry.entry != entry:
                return {"is_ready": False, "is_known": False, "missing": [], "is_new": False}
            return None

        found: Header | None = self._members.poll(ready, seconds)
        if found is not None:
            return found
        with self._members.changed:
            is_new, expected = self._is_new(), self._expected()
            awaited = range(self._count()) if is_new else expected
            missing = sorted(set(awaited) - self._waiting.keys())
            refused = {site: self._members.refused.get(site, "") for site in missing}
        return {
            "is_ready": False,
            "is_known": True,
            "missing": missing,
            "refused": {str(site): why for site, why in refused.items() if why},
            "is_new": is_new,
        }

    def vote(self, site: int, attempt: str, is_done: bool, unusable: int | None) -> None:
        """Count the result of a site's transfers; the first one of a site counts."""
        with self._members.changed:
            current, aborted = self._open, self._aborted
            if current is not None and current.plan.attempt == attempt:
                self._vote(current, site, is_done)
                if unusable in current.plan.members and site in current.plan.members:
                    current.blamed.add(unusable)
            elif aborted is not None and aborted.attempt == attempt:
                if unusable in aborted.members and site in aborted.members:
                    self._refuse({unusable})
            self._members.attempt(self.tick)

    def verdict(self, attempt: str, seconds: float) -> Header:
        """Return whether an attempt counts, once that is decided."""

        def ready() -> Header | None:
            if self._open is not None and self._open.plan.attempt == attempt:
                return None
            is_committed = self._store.is_committed(attempt)
            return {"is_decided": True, "is_committed": is_committed}

        undecided = {"is_decided": False, "is_committed": False}
        return self._members.poll(ready, seconds) or undecided

    def put(self, generation: str, key: str, value: bytes) -> None:
        """Store a value for the members of a generation."""
        with self._members.changed:
            self._refuse_other_generation(generation)
            if len(value) > MOST_VALUE_BYTES:
                raise RefusedError(f"a value of {len(value)} bytes, of at most {MOST_VALUE_BYTES}")
            others = sum(len(k) + len(v) for k, v in self._values.items() if k != key)
            if others + len(key) + len(value) > _MOST_VALUES_BYTES:
                raise RefusedError(f"more than {_MOST_VALUES_BYTES} bytes of values")
            self._values[key] = value
            self._members.changed.notify_all()

    def get(self, generation: str, key: str, seconds: float) -> bytes | None:
        """Return a value of a generation, once it is there."""

        def ready() -> bytes | None:
            self._refuse_other_generation(generation)
            return self._values.get(key)

        found: bytes | None = self._members.poll(ready, seconds)
        return found

    # Rounds

    def tick(self) -> None:
        """Decide the open round, and form the next one, if that is due."""
        if self._open is not None:
            self._decide(self._open)
        if self._open is not None:
            return
        expected, is_new = self._expected(), self._is_new()
        waiting = {site: one for site, one in self._waiting.items() if site in expected}
        rules, now = self._members.rules, self._members.clock()
        if due(
            waiting,
            expected,
            self._count(),
            is_new=is_new,
            window_seconds=rules.window_seconds,
            now=now,
        ):
            self._form({site: one.entry for site, one in waiting.items()}, expected, is_new=is_new)

    def _form(
        self, entries: dict[int, RoundEntry], rows: Mapping[int, SiteRow], *, is_new: bool
    ) -> None:
        incarnations = tuple((s, rows[s].run, rows[s].num_joins) for s in sorted(entries))
        if self._incarnations[0] != incarnations:
            self._incarnations, self._values = (incarnations, secrets.token_hex(8)), {}
        everyone = self._store.sites()
        active = [site for site, row in everyone.items() if row.is_active]
        plain = {name for row in everyone.values() for name in json.loads(row.plain)}
        plan = plan_round(
            entries,
            is_new=is_new,
            generation=self._incarnations[1],
            layouts={site: rows[site].layout for site in sorted(entries)},
            plain=sorted(plain),
        )
        told = self._members.pending()
        last = self._store.record()
        before = set(plan.members if last is None else last["members"])
        plan = replace(plan, events=round_events(plan, events_of(told, plan.number), before))
        if last is not None and plan.number < int(last["number"]):
            self._members.log(
                f"outer step {last['number']} is on none of the sites that are here: they continue "
                f"at {plan.number}"
            )
        for site, one in entries.items():
            self._plans[site] = one.entry, plan
            del self._waiting[site]
        tokens = {site: one.tokens for site, one in entries.items() if site in plan.sites}
        if plan.digests:
            self._members.log(f"{named(plan.members)}: a new run whose weights differ is not begun")
        else:
            absent = set(active) - set(plan.members) - self._waiting.keys()
            self._open = _OpenRound(plan, tokens, told, absent)
        self._members.changed.notify_all()

    def _decide(self, current: _OpenRound) -> None:
        """Commit or abort the open round, once all that are alive have voted."""
        plan, votes, now = current.plan, current.votes, self._members.clock()
        silent = set(plan.members) - votes.keys()
        if not silent and all(votes.values()) and not current.blamed:
            self._commit(current)
            return
        rows = self._store.sites()
        lost = {site for site in silent if not self._members.is_alive(site, has_heartbeat=True)}
        if lost:
            self._end_generation()
        limit = max(rows[site].timeout_seconds for site in plan.members)
        is_over = current.first_vote is not None and now - current.first_vote >= limit
        if silent - lost and not is_over:
            return
        self._abort(current, silent)

    def _commit(self, current: _OpenRound) -> None:
        plan, rows = current.plan, self._store.sites()
        record = {
            "number": plan.number,
            "step": plan.step,
            "sites": list(plan.sites),
            "tokens": {str(site): count for site, count in current.tokens.items()},
            "tokens_seen": plan.tokens_seen,
            "members": list(plan.members),
            "fragment": plan.fragment,
            "time": time.time(),
            "events": [asdict(event) for event in plan.events],
        }
        changed = [
            replace(
                row,
                is_active=row.is_active and site not in current.absent,
                is_training=site in plan.members or row.is_training,
                number=plan.number if site in plan.members else row.number,
            )
            for site, row in rows.items()
        ]
        self._members.write_round(record, changed, current.told, attempt=plan.attempt)
        self._open, self._num_undecided = None, 0
        for site in plan.members:
            self._skipped.pop(site, None)
        if plan.fragment is None:
            self._members.log(f"{named(plan.members)} begin at outer step {plan.number}")
        else:
            self._members.log(f"outer step {plan.number} with {named(plan.sites)}")

    def _abort(self, current: _OpenRound, silent: set[int]) -> None:
        """End the open round without effect; exclude sites for which it failed."""
        plan = current.plan
        self._open, self._aborted = None, plan
        self._end_generation()  # whose groups are broken
        self._members.log(f"no outer step with {named(plan.members)}: {_reason(current, silent)}")
        self._members.changed.notify_all()
        for site in sorted(silent):
            self._members.note(LEFT_OUT, f"site {site}", "was lost during the exchange")
        self._refuse(current.blamed)
        failed = [site for site, is_done in current.votes.items() if not is_done]
        self._num_undecided = 0 if silent or current.blamed else self._num_undecided + 1
        if self._num_undecided > 1 and len(plan.members) > 1:
            # All are here, and some cannot reach each other: one is excluded, each time longer.
            site, self._num_undecided = max(failed), 0
            times = self._skipped.get(site, (0, 0))[1] + 1
            self._skipped[site] = plan.number - 1 + min(2**times, _MOST_SKIPPED), times
            self._members.note(LEFT_OUT, f"site {site}", "cannot reach the others")

    def _refuse(self, blamed: Iterable[int]) -> None:
        """Make no round with these sites until they join again."""
        for site in sorted(blamed):
            text = (
                f"site {site} {UNUSABLE}: it ends -> start it again: it resumes from its newest "
                "checkpoint"
            )
            self._store.write_site(replace(self._members.row(site), refused=text, is_active=False))
            self._waiting.pop(site, None)
            self._members.note(LEFT_OUT, f"site {site}", UNUSABLE)
            self._members.log(f"site {site} is excluded: it {UNUSABLE}")

    def _expected(self) -> dict[int, SiteRow]:
        """Return the sites that the next round waits for, and those that wait for it."""
        record = self._store.record()
        number = 0 if record is None else int(record["number"])
        alive = {
            site: row
            for site, row in self._store.sites().items()
            if row.is_active
            and not row.refused
            and self._members.is_alive(site, has_heartbeat=True)
        }
        reachable = {
            site: row for site, row in alive.items() if self._skipped.get(site, (0, 0))[0] <= number
        }
        return reachable or alive

    def _is_new(self) -> bool:
        entries = [one.entry for one in self._waiting.values()]
        return self._store.record() is None and not any(one.number for one in entries)

    def _count(self) -> int:
        run = self._store.run()
        return 0 if run is None else int(run["sites"]["count"])

    def _detach(self, site: int) -> None:
        """End what a site was about: a round in which it has not voted fails."""
        self._waiting.pop(site, None)
        self._plans.pop(site, None)
        if self._open is not None:
            self._open.absent.discard(site)
            self._vote(self._open, site, is_done=False)

    def _vote(self, current: _OpenRound, site: int, is_done: bool) -> None:
        current.vote(site, is_done, self._members.clock())
        if not current.votes.get(site, True):
            self._end_generation()

    def _end_generation(self) -> None:
        """Refuse `get` and `put` of a round that fails: other members may wait there for a site
        that has voted against it, or is lost."""
        if self._incarnations[1]:
            self._incarnations = (), ""
            self._members.changed.notify_all()

    def _refuse_blamed(self, row: SiteRow) -> None:
        if row.refused:
            raise RefusedError(row.refused)

    def _refuse_other_generation(self, generation: str) -> None:
        if generation != self._incarnations[1]:
            raise RefusedError("the round of this generation is over")


def _reason(current: _OpenRound, silent: set[int]) -> str:
    if current.blamed:
        return f"{named(current.blamed)} {UNUSABLE}"
    if silent:
        return f"{named(silent)} was lost"
    return f"failed for {named(site for site, done in current.votes.items() if not done)}"
