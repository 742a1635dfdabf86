"""Sites of a run, its events and rounds: state that both ways to exchange share."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.sites.metrics import OuterEvent
from bigtrain.sites.protocol import (
    HEARTBEAT_TIMEOUT,
    LONGEST_POLL_SECONDS,
    Header,
    RefusedError,
    escaping,
)
from bigtrain.sites.server.store import SiteRow, Store

_MOST_EVENTS = 50  # of one outer step
_KEPT_EVENTS = 500  # for sites that missed outer steps
_NEW_RUN: Header = {"is_ready": False, "number": 0, "step": 0, "sites": [], "tokens": {}}
_LONGEST_TEXT = 500
EventKey = tuple[str, str, str]
"""Event, who, reason."""
UNUSABLE = "sent values that are not finite, or moved too far"


@dataclass(frozen=True)
class Rules:
    """Rules by which a server makes outer steps.

    is_asynchronous: one for every delivery, weighted by its staleness, instead of one for all
    sites. window_seconds: how long the first site of a round waits for the others.
    """

    is_asynchronous: bool
    window_seconds: float


class Members:
    """Sites of a run, its rounds and events. What methods return is on disk.

    log: writes a line to the server's log. clock: seconds that ascend. changed: the lock of
    everything, notified of each change.
    """

    def __init__(
        self,
        store: Store,
        rules: Rules,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.rules, self.clock = store, rules, clock
        self.log = escaping(log)
        self.changed = threading.Condition(threading.RLock())
        self._events = Counter(store.events())
        self._noted: Counter[EventKey] = Counter()
        self._noted_lock = threading.Lock()
        self._failure = ""
        rows = store.sites()
        self._run_ids = {site: row.run for site, row in rows.items()}
        self._heard = dict.fromkeys(rows, clock())
        self._beating: set[int] = set()
        self._has_joined = False
        self.refused: dict[int, str] = {}  # why the last join of a site was refused
        self.last_heard = clock()

    def admit(self, site: int, request: Header) -> SiteRow:
        """Count a site that begins, or is back, as a member; return its row before. Raises
        RefusedError if it trains something else than the sites before it."""
        run = self.store.run()
        before = self.store.sites().get(site, SiteRow(site))
        try:
            document = self._agreed_run(run, before, request)
        except RefusedError as error:
            self.refused[site] = "; ".join(map(str.strip, str(error).splitlines()))[:_LONGEST_TEXT]
            raise
        self.refused.pop(site, None)
        row = SiteRow(
            site,
            request.get("run", "") or before.run,
            before.num_joins + 1,
            is_active=True,
            number=request.get("number", 0),
            layout=request.get("layout") or "",
            plain=json.dumps(request.get("plain", [])),
            timeout_seconds=float(request.get("timeout_seconds", before.timeout_seconds)),
        )
        with self.store.transaction():
            if document != run:
                self.store.write_run(document)
            self.store.write_site(row)
        self._run_ids[site] = row.run
        self._heard[site], self._has_joined = self.clock(), True
        return before

    def row(self, site: int) -> SiteRow:
        """Return the row of a site. Raises RefusedError if it has not joined."""
        rows = self.store.sites()
        if site not in rows:
            run = self.store.run()
            if run is None:
                raise RefusedError("no site has joined yet")
            refuse_index(site, int(run["sites"]["count"]))
            raise RefusedError(f"site {site} has not joined")
        return rows[site]

    def is_alive(self, site: int, *, has_heartbeat: bool) -> bool:
        """Return whether a site was heard of in time. has_heartbeat: whether every site sends
        heartbeats; else one that has sent none counts as alive."""
        if not has_heartbeat and site not in self._beating:
            return True
        return self.clock() - self._heard.get(site, -HEARTBEAT_TIMEOUT) < HEARTBEAT_TIMEOUT

    def is_over(self, idle_seconds: float) -> bool:
        """Return whether sites have joined this start of the server, and all have left, or none was
        heard of for so long."""
        have_left = self._has_joined and all(row.has_left for row in self.store.sites().values())
        return have_left or self.clock() - self.last_heard >= idle_seconds

    def hear(self, site: int, run: str, *, is_beat: bool) -> None:
        """Note that a site is alive; without the lock, which an outer step may hold."""
        if self._run_ids.get(site) == run or not run:
            self._heard[site] = self.last_heard = self.clock()
            if is_beat:
                self._beating.add(site)

    def _agreed_run(self, run: Header | None, before: SiteRow, request: Header) -> Header:
        """Return the description of the run once a site has joined it. Raises RefusedError."""
        own = described(request)
        refuse_index(before.site, int((own if run is None else run)["sites"]["count"]))
        self._refuse_other_run(before, request)
        document = own if run is None else self._with_changes(run, request)
        _refuse_differences(_facts_of(document), _facts_of(own))
        return document

    def _refuse_other_run(self, before: SiteRow, request: Header) -> None:
        """Refuse a second run with the index of a site that takes part."""
        run = request.get("run", "")
        if before.run and run and run != before.run and before.is_active:
            if "sites.index" not in request.get("allowed", ()):
                raise RefusedError(
                    f"sites.index = {before.site}: another run directory (run {before.run}) takes "
                    "part as this site, and has not left -> a sites.index of its own, or stop that "
                    "run; if it is lost for good, checkpoint.allow_changes=[sites.index] takes its "
                    "place"
                )

    def refuse_stranger(self, site: int, run: str) -> None:
        """Refuse a request of a site that has not joined, or of a second run with its index."""
        holder = self.row(site).run
        if run and holder and run != holder:
            raise RefusedError(
                f"sites.index = {site}: another run directory (run {holder}) takes part as this "
                "site"
            )

    def _with_changes(self, run: Header, request: Header) -> Header:
        """Return the run with what a site's ``checkpoint.allow_changes`` names from it, as its
        checkpoints do: the sites after it must agree with that."""
        facts = dict(run["facts"])
        changed = [
            key
            for key in {*facts, *request["facts"]}
            if facts.get(key) != request["facts"].get(key)
            and any(f"{key}.".startswith(f"{entry}.") for entry in request.get("allowed", ()))
        ]
        for key in changed:
            self.log(f"{key}: {_shown(request['facts'].get(key))} from now on")
            facts[key] = request["facts"].get(key)
        sites = dict(run["sites"])
        if "sites.count" in changed:  # which the outer rate may depend on
            sites["count"] = request["sites"]["count"]
        return {**run, "facts": facts, "sites": sites}

    # Rounds and events

    def summary(self, heard: int | None = None) -> Header:
        """Return where the run is: the last outer step, its sites, the optimizer steps it follows;
        and the events since the outer step `heard`, of which a site knows (None: the last one's).
        """
        record = self.store.record()
        if record is None:
            return dict(_NEW_RUN)
        last = int(record["number"]) - 1 if heard is None else heard
        records = self.store.records_after(last)
        events = [event for one in records for event in one.get("events", ())]
        return {"is_ready": True, **record, "events": events[-_KEPT_EVENTS:]}

    def wait(self, base: int, seconds: float, heard: int | None = None) -> Header:
        """Return the `summary`, after an outer step later than `base`, or after `seconds`."""

        def made() -> Header | None:
            record = self.store.record()
            return None if record is None or record["number"] <= base else self.summary(heard)

        return self.poll(made, seconds) or self.summary(heard)

    def poll(self, ready: Callable[[], Any], seconds: float) -> Any:
        """Return what `ready` returns, as soon as that is not None, or after `seconds`."""
        end = time.monotonic() + min(seconds, LONGEST_POLL_SECONDS)
        with self.changed:
            while (found := ready()) is None and (left := end - time.monotonic()) > 0:
                self.changed.wait(left)
            return found

    def write_round(
        self, record: Header, sites: Iterable[SiteRow], told: Counter[EventKey], **more: Any
    ) -> None:
        """Store a round. told: the events before it that its record contains."""
        left = self._events - told
        self.store.write_round(record, sites, left, **more)
        self._events, self._failure = left, ""
        self.changed.notify_all()

    def pending(self) -> Counter[EventKey]:
        """Return how often each event has happened since the last round."""
        self.note_now()
        return self._events.copy()

    def note(self, event: str, who: str, reason: str) -> None:
        """Report to the sites with the next outer step that this has happened, and how often: a
        kind of `OuterEvent`. Of strangers only the first ones are kept apart."""
        with self.changed:
            key = event, who, reason
            if key in self._events or len(self._events) < _MOST_EVENTS:
                self._events[key] += 1
                # Not each time: a stranger's messages must not keep the disk busy.
                if self._events[key].bit_count() == 1:
                    try:
                        self.store.write_event(key, self._events[key])
                    except OSError as error:
                        self.log_failure(f"an event could not be stored: {error}")

    def note_later(self, event: str, who: str, reason: str) -> None:
        """Do as `note`, at the next `tick`: for callers that must not wait for an outer step."""
        with self._noted_lock:
            key = event, who, reason
            if key in self._noted or len(self._noted) < _MOST_EVENTS:
                self._noted[key] += 1

    def note_now(self) -> None:
        """Note what `note_later` was given."""
        with self._noted_lock:
            noted, self._noted = self._noted, Counter()
        for key, count in noted.items():
            for _ in range(count):
                self.note(*key)

    def attempt(self, work: Callable[[], None]) -> None:
        """Call `work`; log a failure once, since the next `tick` repeats it."""
        try:
            work()
        except Exception as error:
            self.log_failure(f"the next outer step could not be made: {error!r}")

    def log_failure(self, text: str) -> None:
        """Log a failure that may come at each try once."""
        if text != self._failure:
            self._failure = text
            self.log(f"{text}; it is repeated until it succeeds")


def refuse_index(site: int, count: int) -> None:
    """Raise RefusedError for a site that is not one of `count`."""
    if not 0 <= site < count:
        raise RefusedError(f"sites.index = {site}: sites.count = {count} has 0 to {count - 1}")


def described(request: Header) -> Header:
    """Return the description of the run that a site joins."""
    names = ("facts", "sites", "parameters")
    return {**{k: request[k] for k in names}, "exchange": request.get("exchange", "server")}


def _facts_of(run: Mapping[str, Any]) -> Header:
    names = ("parameters", "sites")
    return {**run["facts"], **{k: run[k] for k in names}, "sites.exchange": run["exchange"]}


def _refuse_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    lines = [
        f"  {key}: {_shown(there.get(key))} there, {_shown(here.get(key))} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]
    if lines:
        raise RefusedError(
            "the server's run has other settings or data -> give all sites the same, or another "
            "directory to the server:\n" + "\n".join(lines)
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def events_of(counts: Mapping[EventKey, int], number: int) -> list[OuterEvent]:
    """Return what has happened before outer step `number`."""
    return [OuterEvent(*key, number, count) for key, count in counts.items()]


def named(sites: Iterable[int]) -> str:
    """Return the sites as a log line names them."""
    numbers = ", ".join(map(str, sorted(sites)))
    return f"site {numbers}" if numbers else "no site"
