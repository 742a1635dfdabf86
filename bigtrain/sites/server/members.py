"""Sites of a run, its events and outer steps: state that both ways to exchange share."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.sites.metrics import OuterEvent
from bigtrain.sites.protocol import (
    HEARTBEAT_TIMEOUT,
    LONGEST_POLL_SECONDS,
    Header,
    JoinRequest,
    RefusedError,
    StepRecord,
    one_line_log,
)
from bigtrain.sites.server.store import EventKey, ServerDirectory, SiteRow

RECONNECT_SECONDS = 3.0
"""Time that a site has to be heard of again once the connection of its heartbeats was closed."""
UNUSABLE = "sent values that are not finite, or moved too far"
_MOST_EVENTS = 50  # of one outer step
_KEPT_EVENTS = 500  # for sites that missed outer steps
_LONGEST_TEXT = 500


@dataclass(frozen=True)
class Rules:
    """Rules by which a server makes outer steps.

    is_asynchronous: a step for every delivery, weighted by its staleness, instead of a common step
    for all sites. window_seconds: how long the first site at an outer step waits for further sites.
    """

    is_asynchronous: bool
    window_seconds: float


class Members:
    """Sites of a run, its outer steps and events. What methods return is on disk.

    log: writes a line to the server's log. clock: seconds that ascend. changed: the lock of
    everything, notified of each change. refused: by site, why its last join was refused.
    """

    def __init__(
        self,
        store: ServerDirectory,
        rules: Rules,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.rules, self.clock = store, rules, clock
        self.log = one_line_log(log)
        self.changed = threading.Condition(threading.RLock())
        self.refused: dict[int, str] = {}
        self._failure = ""
        self._events = Counter(store.events())
        self._noted: Counter[EventKey] = Counter()
        self._noted_lock = threading.Lock()
        rows = store.sites()
        self._run_ids = {site: row.run for site, row in rows.items()}
        self._alive_until = dict.fromkeys(rows, clock() + HEARTBEAT_TIMEOUT)
        self._last_heard = clock()
        self._has_joined = False
        # By site: its description before it builds its model, and how long that holds.
        self._announced: dict[int, tuple[Header, float]] = {}

    # Sites

    def member(self, site: int, run: str = "") -> SiteRow:
        """Return the row of a site. Raises RefusedError if it has not joined, or if `run` is not
        the id of the run directory with which it joined."""
        row, document = self.store.sites().get(site), self.store.run()
        if document is None:
            raise RefusedError("no site has joined yet")
        if row is None:
            refuse_index(site, document)
            raise RefusedError(f"site {site} has not joined")
        if run and run != row.run:
            raise RefusedError(
                f"sites.index = {site}: another run directory (run {row.run}) takes part as this "
                "site"
            )
        return row

    def admit(self, request: JoinRequest) -> SiteRow:
        """Count a site that begins, or is back, as a member; return its previous row. Raises
        RefusedError if its run differs from the run of the sites that have joined."""
        site, run = request.site, self.store.run()
        previous_row = self.store.sites().get(site, SiteRow(site))
        document = self.agreed_run(request)
        old_facts = document["facts"] if run is None else run["facts"]
        for key, value in document["facts"].items():
            if old_facts.get(key) != value:
                self.log(f"{key}: {_shown(value)} from now on")
        row = SiteRow(
            site,
            request.run,
            previous_row.num_joins + 1,
            is_active=True,
            number=request.number,
            layout=request.layout,
            plain=json.dumps(request.plain),
            timeout_seconds=request.timeout_seconds,
        )
        with self.store.transaction():
            if document != run:
                self.store.write_run(document)
            self.store.write_site(row)
        self._run_ids[site], self._has_joined = row.run, True
        self.hear(site, row.run)
        return previous_row

    def agreed_run(self, request: JoinRequest) -> Header:
        """Return the description of the run as it will be once the site has joined. Raises
        RefusedError, and keeps the reason in `refused`."""
        run, joining = self.store.run(), run_description(request)
        previous = self.store.sites().get(request.site, SiteRow(request.site))
        try:
            refuse_index(request.site, run or joining)
            is_other_directory = previous.run and request.run != previous.run
            may_replace = not previous.is_active or "sites.index" in request.allowed
            if is_other_directory and not may_replace:
                raise RefusedError(
                    f"sites.index = {previous.site}: another run directory (run {previous.run}) "
                    "takes part as this site, and has not left -> a sites.index of its own, or "
                    "stop that run; if it is lost for good, "
                    "checkpoint.allow_changes=[sites.index] replaces it"
                )
            document = joining if run is None else _with_changes(run, request)
            if request.parameters is None:
                # The site asks before it builds its model. If no site has joined, there is no run
                # to compare it with: compare it with other sites that have only asked.
                now = self.clock()
                self._announced.pop(request.site, None)
                if run is None:
                    for announced, until in self._announced.values():
                        if now < until:
                            _refuse_differences(announced, joining)
                self._announced[request.site] = joining, now + request.timeout_seconds
                joining["parameters"] = document["parameters"]
            _refuse_differences(document, joining)
        except RefusedError as error:
            one_line = "; ".join(map(str.strip, str(error).splitlines()))
            self.refused[request.site] = one_line[:_LONGEST_TEXT]
            raise
        self.refused.pop(request.site, None)
        return document

    def hear(self, site: int, run: str) -> None:
        """Record that a site is alive; without the lock, which an outer step may hold."""
        if self._run_ids.get(site) == run:
            self._last_heard = self.clock()
            self._alive_until[site] = self._last_heard + HEARTBEAT_TIMEOUT

    def hang_up(self, site: int, run: str) -> None:
        """Record that the connection of a site's heartbeats was closed, as the system does when
        the site's process is killed; without the lock."""
        if self._run_ids.get(site) == run:
            limit = self.clock() + RECONNECT_SECONDS
            self._alive_until[site] = min(limit, self._alive_until[site])

    def is_alive(self, site: int) -> bool:
        """Return whether the last request of a site is recent enough."""
        return site in self._alive_until and self.clock() < self._alive_until[site]

    def is_over(self, idle_seconds: float) -> bool:
        """Return whether sites have joined this start of the server and all have left, or no site
        has sent a request for `idle_seconds`."""
        have_left = self._has_joined and all(row.has_left for row in self.store.sites().values())
        return have_left or self.clock() - self._last_heard >= idle_seconds

    # Outer steps

    def summary(self, heard_step: int | None = None) -> Header:
        """Return the record of the last outer step, with the events since outer step `heard_step`,
        whose events the site has (None: with the events of the last outer step)."""
        record = self.store.record()
        if record is None:
            return {"is_ready": False, **StepRecord().model_dump(mode="json")}
        last_heard = int(record["number"]) - 1 if heard_step is None else heard_step
        records = self.store.records_after(last_heard)
        events = [event for record in records for event in record.get("events", ())]
        return {"is_ready": True, **record, "events": events[-_KEPT_EVENTS:]}

    def wait(self, base: int, seconds: float, heard_step: int | None = None) -> Header:
        """Wait for an outer step later than `base`, at most `seconds`; return the `summary`."""

        def ready() -> bool | None:  # as `poll` expects: None while it has to wait
            record = self.store.record()
            return True if record is not None and record["number"] > base else None

        self.poll(ready, seconds)
        return self.summary(heard_step)

    def poll(self, ready: Callable[[], Any], seconds: float) -> Any:
        """Return what `ready` returns, as soon as that is not None, or after `seconds`."""
        end = time.monotonic() + min(seconds, LONGEST_POLL_SECONDS)
        with self.changed:
            while (answer := ready()) is None and (remaining_seconds := end - time.monotonic()) > 0:
                self.changed.wait(remaining_seconds)
            return answer

    def write_step(
        self,
        record: Header,
        reported: Counter[EventKey],
        made_by: Collection[int] = (),
        absent: Collection[int] = (),
        **contributions: Any,
    ) -> None:
        """Store an outer step of the sites `made_by`; the sites `absent` are not waited for
        afterwards. reported: events that the record already contains. contributions: further
        arguments of `ServerDirectory.write_step`."""
        rows = [
            replace(
                row,
                is_active=row.is_active and site not in absent,
                is_training=row.is_training or site in made_by,
                number=record["number"] if site in made_by else row.number,
            )
            for site, row in self.store.sites().items()
        ]
        unreported = self._events - reported  # events that happened after `pending`
        self.store.write_step(record, rows, unreported, **contributions)
        self._events, self._failure = unreported, ""
        self.changed.notify_all()

    def attempt(self, work: Callable[[], None]) -> None:
        """Call `work`; log a failure once, since the next `tick` repeats it."""
        try:
            work()
        except Exception as error:
            self._log_failure(f"the next outer step could not be made: {error!r}")

    def _log_failure(self, text: str) -> None:
        if text != self._failure:
            self._failure = text
            self.log(f"{text}; it is repeated until it succeeds")

    # Events

    def note(self, event: str, who: str, reason: str) -> None:
        """Count an `OuterEvent`, which the sites get with the next outer step. Does not wait for
        the lock. Only the first `_MOST_EVENTS` different events are kept, since strangers cause
        events, too."""
        with self._noted_lock:
            key = EventKey(event, who, reason)
            if key in self._noted or len(self._noted) < _MOST_EVENTS:
                self._noted[key] += 1

    def pending(self) -> Counter[EventKey]:
        """Return how often each event has happened since the last outer step. Adds the events of
        `note` first. A count is written to the store when it passes a power of two, so that a
        repeated event does not keep the disk busy."""
        with self._noted_lock:
            noted, self._noted = self._noted, Counter()
        for key, count in noted.items():
            stored_count = self._events[key]
            if not stored_count and len(self._events) > _MOST_EVENTS:
                continue  # a new event, and there are enough
            self._events[key] += count
            if self._events[key].bit_length() > stored_count.bit_length():
                try:
                    self.store.write_event(key, self._events[key])
                except OSError as error:
                    self._log_failure(f"an event could not be stored: {error}")
        return self._events.copy()


def run_description(request: JoinRequest) -> Header:
    """Return the description of the run that a site joins; its values are shared with `request`."""
    names = ("facts", "sites", "parameters", "exchange")
    return {name: getattr(request, name) for name in names}


def refuse_index(site: int, run: Header) -> None:
    """Raise RefusedError for a site that is not one of the `run`."""
    count = int(run["sites"]["count"])
    if not 0 <= site < count:
        raise RefusedError(f"sites.index = {site}: sites.count = {count} has 0 to {count - 1}")


def _with_changes(run: Header, request: JoinRequest) -> Header:
    """Return the run with the facts of the site that its ``checkpoint.allow_changes`` names, as its
    checkpoints have them; sites that join later must have the changed facts."""
    facts, sites = dict(run["facts"]), dict(run["sites"])
    for key in {*facts, *request.facts}:
        value = request.facts.get(key)
        # An entry allows a key and, if it names a section, all keys of that section.
        is_allowed = any(f"{key}.".startswith(f"{entry}.") for entry in request.allowed)
        if facts.get(key) != value and is_allowed:
            facts[key] = value
            if key == "sites.count":  # which the outer rate may depend on
                sites["count"] = request.sites["count"]
    return {**run, "facts": facts, "sites": sites}


def _refuse_differences(run: Header, joining: Header) -> None:
    """Raise RefusedError with the differences between the server's run and the run of a site."""
    names = {"parameters": "parameters", "sites": "sites", "sites.exchange": "exchange"}
    server_values, site_values = (
        {**description["facts"], **{key: description[name] for key, name in names.items()}}
        for description in (run, joining)
    )
    if lines := [
        f"  {key}: {_shown(server_values.get(key))} there, {_shown(site_values.get(key))} here"
        for key in sorted({*server_values, *site_values})
        if server_values.get(key) != site_values.get(key)
    ]:
        raise RefusedError(
            "the server's run has other settings or data -> give all sites the same, or another "
            "directory to the server:\n" + "\n".join(lines)
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def as_events(counts: Mapping[EventKey, int], number: int) -> list[OuterEvent]:
    """Return counted events; number: their outer step."""
    return [OuterEvent(*key, number, count) for key, count in counts.items()]


def site_names(sites: Iterable[int]) -> str:
    """Return the sites as a log line names them."""
    numbers = ", ".join(map(str, sorted(sites)))
    return f"site {numbers}" if numbers else "no site"
