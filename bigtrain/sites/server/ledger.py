"""Who takes part in an outer step of a server, and the step itself. Knows nothing of HTTP."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.contribution import UnusableError
from bigtrain.sites.metrics import LEFT_OUT, RETURNED, OuterEvent
from bigtrain.sites.protocol import (
    MOST_STEP,
    MOST_TOKENS,
    Header,
    RefusedError,
    escaping,
    unpack,
)
from bigtrain.sites.rectangles import Box
from bigtrain.sites.server.global_weights import GlobalWeights, NextStep
from bigtrain.sites.server.storage import Delivery, Storage

_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_LONGEST_POLL_SECONDS = 20.0
_MOST_EVENTS = 50  # of one outer step
_KEPT_EVENTS = 500  # of all, for sites that miss outer steps
_UNUSABLE = "sent values that are not finite, or moved too far"


@dataclass(frozen=True)
class Rules:
    """How a server makes outer steps.

    is_asynchronous: one for every delivery, weighted by its staleness, instead of one for all
    sites. window_seconds: how long the first to deliver is let wait for the others.
    """

    is_asynchronous: bool
    window_seconds: float


class Ledger:
    """The global weights of a run, the deliveries for the next outer step, and the sites that are
    waited for. Methods may be called from several threads; what they return is on disk.

    say: shows a line to whoever runs the server.
    """

    def __init__(self, storage: Storage, rules: Rules, say: Callable[[str], None]) -> None:
        self.rules = rules
        self._storage = storage
        self._say = escaping(say)
        self._changed = threading.Condition(threading.RLock())
        self._weights: GlobalWeights | None = None
        self._facts: dict[str, Any] = {}
        self._uploader: int | None = None
        self._active = storage.read_active()
        self._holders = storage.read_holders()  # the run that each site was last
        self._delivered: dict[int, Delivery] = {}
        self._noted: Counter[tuple[str, str, str]] = Counter()
        self._noted_lock = threading.Lock()
        self._unusable: set[int] = set()  # not waited for at the next outer step
        self._failure = ""
        self._waits_since: float | None = None
        self._events: Counter[tuple[str, str, str]] = Counter()
        self._told: deque[dict[str, Any]] = deque(maxlen=_KEPT_EVENTS)
        run = storage.read_run()
        state = storage.read_state()
        for one in storage.read_events(0 if state is None else int(state[1]["number"])):
            self._events[one["event"], one["who"], one["reason"]] = int(one["count"])
        if run is not None:
            weights = self._weights = _built(run, rules)
            self._facts = _facts_of(run)
            if state is not None:
                weights.restore(*state)
                self._told.extend(storage.events(weights.record))
                self._restore_deliveries()
                say(
                    f"outer step {weights.number}, with deliveries of {_named(self._delivered)} "
                    "for the next one"
                )

    def join(self, site: int, request: Header) -> Header:
        """A site begins, or is back; it is waited for from now on. Raises RefusedError if it trains
        something else than the sites before it."""
        with self._changed:
            if self._weights is None:
                _refuse_index(site, int(request["sites"]["count"]))
                weights = _built(
                    request, self.rules
                )  # before it is on disk: it may not be possible
                self._storage.write_run(request)
                self._facts, self._weights = _facts_of(request), weights
            self._refuse_other_run(site, request)
            self._follow_changes(request)
            _refuse_differences(self._facts, _facts_of(request))
            _refuse_index(site, self._weights.sites.count)
            if not self._weights.is_ready and self._uploader in (None, site):
                self._uploader = site
                self._weights.begin_again()  # what an upload before has left counts no longer
            if site not in self._active and self._weights.number:
                self.note(RETURNED, f"site {site}", "joined")
            self._hear(site)
            self._say(f"site {site} joined at outer step {self._weights.number}")
            return {
                **self.state(),
                "uploads": self._uploader == site and not self._weights.is_ready,
                "is_asynchronous": self.rules.is_asynchronous,
                "window_seconds": self.rules.window_seconds,
            }

    def note(self, event: str, who: str, reason: str) -> None:
        """Tell the sites with the next outer step that this has happened, and how often: a kind of
        `OuterEvent`. Of strangers only the first ones are kept apart."""
        with self._changed:
            key = event, who, reason
            if key in self._events or len(self._events) < _MOST_EVENTS:
                self._events[key] += 1
                # Not each time: a stranger's messages must not keep the disk busy.
                if self._events[key].bit_count() == 1:
                    number = self._weights.number if self._weights is not None else 0
                    try:
                        self._storage.write_events(number, self._happened(number))
                    except OSError as error:
                        self._say_failure(f"an event could not be kept: {error}")

    def note_later(self, event: str, who: str, reason: str) -> None:
        """As `note`, at the next `tick`: for whoever must not wait for an outer step."""
        with self._noted_lock:
            key = event, who, reason
            if key in self._noted or len(self._noted) < _MOST_EVENTS:
                self._noted[key] += 1

    def _note_now(self) -> None:
        with self._noted_lock:
            noted, self._noted = self._noted, Counter()
        for key, count in noted.items():
            for _ in range(count):
                self.note(*key)

    def _happened(self, number: int) -> list[dict[str, Any]]:
        """The events since the last outer step, as `OuterEvent`s."""
        return [
            asdict(OuterEvent(event, who, reason, number, count))
            for (event, who, reason), count in self._events.items()
        ]

    def state(self, heard: int | None = None) -> Header:
        """Where the run is: the last outer step, its sites, the optimizer steps it follows; and the
        events since the outer step `heard`, of which a site has been told (None: the last one's).
        """
        with self._changed:
            weights = self._weights
            if weights is None:
                return {"is_ready": False, "number": 0, "step": 0, "sites": [], "tokens": {}}
            last = weights.number - 1 if heard is None else heard
            events = [one for one in self._told if one["outer_step"] > last]
            return {"is_ready": weights.is_ready, **weights.record, "events": events}

    def wait(self, base: int, seconds: float, heard: int | None = None) -> Header:
        """As `state`, once there are weights of an outer step after `base`, or after `seconds`."""
        end = time.monotonic() + min(seconds, _LONGEST_POLL_SECONDS)
        with self._changed:
            while not self._is_after(base) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return self.state(heard)

    def upload(self, request: Header, payload: memoryview) -> None:
        """Initial weights from the site that was asked for them."""
        with self._changed:
            weights = self._require()
            if weights.is_ready:
                raise RefusedError("the initial weights are there")
            if len(payload) % 4 or not payload:
                raise RefusedError(f"{len(payload)} bytes are no float32 values")
            values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
            try:
                weights.begin(self._boxes(request), values)
            except ValueError as error:
                raise RefusedError(str(error)) from error

    def uploaded(self) -> None:
        """The initial weights are complete. Raises RefusedError if they are not."""
        with self._changed:
            weights = self._require()
            if not weights.is_ready:
                try:
                    weights.refuse_unfilled()
                except ValueError as error:
                    raise RefusedError(str(error)) from error
                self._storage.write_state(weights.tensors(), weights.record)
                weights.ready()
            self._changed.notify_all()

    def contribute(
        self, site: int, request: Header, payload: memoryview, body: bytes | bytearray
    ) -> None:
        """A message with a part of what a site has changed; kept as it came."""
        attempt, rank, part = str(request["attempt"]), int(request["rank"]), int(request["part"])
        if not _ATTEMPT.fullmatch(attempt):
            raise RefusedError(f"attempt {attempt!r}")
        _refuse_index(site, self._require().sites.count)
        self._refuse_not_holder(site, str(request.get("run", "")))
        try:
            self._require().refuse_payload(self._boxes(request), payload)
        except UnusableError as error:
            raise self._refused_unusable(site, error) from error
        except ValueError as error:
            raise RefusedError(str(error)) from error
        self._storage.write_message(site, attempt, f"{rank:06d}-{part:06d}", body)

    def deliver(self, site: int, request: Header) -> Header:
        """All of a site's change is here. Returns the state, with ``late`` where the step that it
        was meant for has been made without it. Raises RefusedError if messages are missing."""
        with self._changed:
            weights = self._require()
            delivery = Delivery(
                str(request["attempt"]),
                int(request["base"]),
                int(request["step"]),
                int(request["tokens"]),
                int(request["num_messages"]),
            )
            heard = request.get("heard")
            heard = delivery.base if heard is None else int(heard)
            _refuse_index(site, weights.sites.count)
            _refuse_numbers(delivery)
            self._refuse_not_holder(site, str(request.get("run", "")))
            self._hear(site)
            staleness = weights.number - delivery.base
            if staleness < 0 or (staleness > 0 and not self.rules.is_asynchronous):
                self._storage.forget(site)
                self.note(LEFT_OUT, f"site {site}", "late")
                self._say(
                    f"site {site} was late for outer step {delivery.base + 1}: left out, it takes "
                    f"the weights of {weights.number}"
                )
                return {**self.state(heard), "late": True}
            self._refuse_contribution(site, delivery)
            self._storage.deliver(site, delivery)
            self._delivered[site] = delivery
            self._unusable.discard(site)
            if self._waits_since is None:
                self._waits_since = time.monotonic()
            self.tick()
            return self.state(heard)

    def leave(self, site: int, reason: str = "", run: str = "") -> None:
        """A site has trained to its end, or stops: it is not waited for. reason: why its change
        cannot be used, if it ends for that."""
        _refuse_index(site, self._require().sites.count)
        with self._changed:
            self._refuse_not_holder(site, run)
            self._keep_active(self._active - {site})
            self._say(f"site {site} left" + (f": {reason}" if reason else ""))
            if reason:
                self.note(LEFT_OUT, f"site {site}", _UNUSABLE)
            self.tick()

    def weights(self, request: Header) -> tuple[Header, bytes]:
        """Rectangles of the global weights of outer step ``number``: the last ``update``, encoded,
        or ``full``, in float32. Raises RefusedError if another step was made meanwhile."""
        with self._changed:
            weights = self._require()
            if request.get("number") != weights.number or not weights.is_ready:
                raise RefusedError(f"outer step {weights.number} was made meanwhile")
            form = "full" if request.get("form") != "update" else "update"
            return weights.cut(self._boxes(request), form)

    def tick(self) -> None:
        """Make the outer step if nobody is to be waited for any longer. Whatever fails leaves the
        state as it was, is said once, and is tried again at the next call."""
        with self._changed:
            try:
                self._note_now()
                while (absent := self._due()) is not None:
                    self._make_step(absent)
                    self._changed.notify_all()
            except Exception as error:
                number = self._weights.number + 1 if self._weights is not None else 0
                self._say_failure(f"outer step {number} could not be made: {error!r}")

    def _due(self) -> set[int] | None:
        """The sites that an outer step is made without now; None where none is due."""
        if not self._delivered or self._waits_since is None:
            return None
        if self.rules.is_asynchronous:
            return set()
        expected = set(self._active)
        if self._require().number == 0:  # all start at about the same time
            expected.update(range(self._require().sites.count))
        absent = expected - self._delivered.keys() - self._unusable
        waited = time.monotonic() - self._waits_since
        return None if absent and waited < self.rules.window_seconds else absent

    def _make_step(self, absent: set[int]) -> None:
        """One outer step: on disk, then in memory."""
        weights, delivered = self._require(), dict(self._delivered)
        if self.rules.is_asynchronous:
            first = min(delivered)
            delivered = {first: delivered[first]}
        after = self._computed(delivered)
        if after is None:  # a delivery was set aside
            return
        for site in absent:
            self.note(LEFT_OUT, f"site {site}", "missed the outer step")
        number = weights.number + 1
        after.record["events"] = self._happened(number)
        after.record["attempts"] = {str(site): one.attempt for site, one in delivered.items()}
        try:
            self._storage.write_state(after.tensors, after.record)
        except BaseException:
            for site in absent:  # noted again when it is tried again
                self._events.pop((LEFT_OUT, f"site {site}", "missed the outer step"), None)
            raise
        weights.commit(after)
        self._events.clear()
        self._told.extend(after.record["events"])
        self._unusable.clear()
        for site in delivered:
            self._storage.forget(site)
            del self._delivered[site]
        self._waits_since = time.monotonic() if self._delivered else None
        self._failure = ""
        if absent:
            self._say(
                f"{_named(absent)} missed outer step {number} by more than "
                f"{self.rules.window_seconds:g} s: left out until they are back"
            )
        self._say(f"outer step {number} with {_named(delivered)}")
        self._keep_active(self._active - absent)

    def _computed(self, delivered: Mapping[int, Delivery]) -> NextStep | None:
        """The state after a step with these; None where one of them, set aside, makes it fail."""
        weights = self._require()
        share = 1.0
        if self.rules.is_asynchronous:
            ((_, one),) = delivered.items()
            share = staleness_weight(weights.number - one.base) / max(1, len(self._active))

        def computed(of: Mapping[int, Delivery]) -> NextStep:
            return weights.step(
                {site: one.tokens for site, one in of.items()},
                {site: partial(self._read, site, one) for site, one in of.items()},
                share,
                max(one.step for one in of.values()),
            )

        try:
            return computed(delivered)
        except MemoryError:
            raise
        except Exception as error:
            cause: tuple[int, Exception] = max(delivered), error
            for site, one in delivered.items() if len(delivered) > 1 else ():
                try:
                    computed({site: one})
                except Exception as its:
                    cause = site, its
                    break
        self._set_aside(*cause)
        return None

    def _set_aside(self, site: int, error: Exception) -> None:
        """Take a delivery out of the next outer step, which cannot be made with it."""
        place = self._storage.set_aside(site)
        self._delivered.pop(site, None)
        self._unusable.add(site)
        self.note(LEFT_OUT, f"site {site}", "its delivery makes the outer step fail")
        self._say(
            f"site {site} is left out of outer step {self._require().number + 1}, which cannot be "
            f"made with its delivery ({error!r}): set aside in {place}"
        )

    def _refused_unusable(self, site: int, error: UnusableError) -> RefusedError:
        """Leave a site out of the next outer step; returns what it is told."""
        with self._changed:
            if site not in self._delivered:  # what was confirmed before stays
                self._storage.forget(site)
                self._unusable.add(site)
                self._keep_active(self._active - {site})
            self.note(LEFT_OUT, f"site {site}", _UNUSABLE)
            self._say(
                f"site {site} is left out of outer step {self._require().number + 1}: it sent "
                f"{error}"
            )
            self.tick()
        return RefusedError(f"site {site} sent {error}: it is left out")

    def _say_failure(self, text: str) -> None:
        """Show a failure that may come at each try once."""
        if text != self._failure:
            self._failure = text
            self._say(f"{text}; it is tried again")

    def _keep_active(self, sites: set[int]) -> None:
        """Wait for these from now on; a disk that is full does not hold this up."""
        try:
            self._storage.write_active(sites)
        except OSError as error:
            self._say_failure(f"which sites are waited for could not be kept: {error}")
        self._active = sites

    def _refuse_other_run(self, site: int, request: Header) -> None:
        """Refuse a second run with the index of a site that takes part; it holds the index from now
        on otherwise."""
        run, holder = str(request.get("run", "")), self._holders.get(site, "")
        if not run or run == holder:
            return
        is_allowed = "sites.index" in request.get("allowed", ())
        if holder and site in self._active and not is_allowed:
            raise RefusedError(
                f"sites.index = {site}: another run directory (run {holder}) takes part as this "
                "site, and has not left -> a sites.index of its own, or stop that run; if it is "
                "lost for good, checkpoint.allow_changes=[sites.index] takes its place"
            )
        holders = {**self._holders, site: run}
        self._storage.write_holders(holders)
        self._holders = holders

    def _refuse_not_holder(self, site: int, run: str) -> None:
        holder = self._holders.get(site, "")
        if run and holder and run != holder:
            raise RefusedError(
                f"sites.index = {site}: another run directory (run {holder}) takes part as this "
                "site"
            )

    def _follow_changes(self, request: Header) -> None:
        """Take what a site's ``checkpoint.allow_changes`` names from it, as its checkpoints do: the
        sites after it must agree with that."""
        run = self._storage.read_run()
        if run is None or self._weights is None:
            return
        changed = [
            key
            for key in {*run["facts"], *request["facts"]}
            if run["facts"].get(key) != request["facts"].get(key)
            and any(f"{key}.".startswith(f"{entry}.") for entry in request.get("allowed", ()))
        ]
        if not changed:
            return
        for key in changed:
            self._say(f"{key}: {_shown(request['facts'].get(key))} from now on")
            run["facts"][key] = request["facts"].get(key)
        if "sites.count" in changed:  # which the outer rate may depend on
            run["sites"]["count"] = request["sites"]["count"]
        self._storage.write_run(run)
        self._facts = _facts_of(run)
        self._weights.sites = _section(run)

    def _restore_deliveries(self) -> None:
        """Take the deliveries on disk that the step after the last one may use."""
        weights = self._require()
        used = weights.record.get("attempts", {})
        for site, delivery in list(self._storage.deliveries()):
            if isinstance(delivery, Exception):
                self._set_aside(site, delivery)
                continue
            is_current = delivery.base == weights.number or (
                self.rules.is_asynchronous and delivery.base < weights.number
            )
            is_used = used.get(str(site)) == delivery.attempt
            if not is_current or is_used:
                self._storage.forget(site)
                continue
            try:
                _refuse_index(site, weights.sites.count)
                _refuse_numbers(delivery)
                self._refuse_incomplete(site, delivery)
            except Exception as error:
                self._set_aside(site, error)
            else:
                self._delivered[site] = delivery
                self._waits_since = time.monotonic()

    def _refuse_contribution(self, site: int, delivery: Delivery) -> None:
        try:
            self._refuse_incomplete(site, delivery)
        except UnusableError as error:
            raise self._refused_unusable(site, error) from error
        except ValueError as error:
            raise RefusedError(str(error)) from error

    def _refuse_incomplete(self, site: int, delivery: Delivery) -> None:
        # Every element once, else the mean would be of something else than the model.
        self._require().refuse_contribution(partial(self._read, site, delivery))

    def _files(self, site: int, delivery: Delivery) -> list[Path]:
        return self._storage.messages(site, delivery.attempt)

    def _read(self, site: int, delivery: Delivery) -> Iterator[tuple[list[Box], memoryview]]:
        """The messages of a delivery, one at a time in memory. Raises RefusedError if some are
        missing."""
        files = self._files(site, delivery)
        if len(files) != delivery.num_messages:
            raise RefusedError(f"{len(files)} of {delivery.num_messages} messages are here")
        for path in files:
            header, payload = unpack(path.read_bytes())
            yield self._boxes(header), payload

    def _boxes(self, request: Header) -> list[Box]:
        shapes = self._require().shapes
        try:
            return [Box.from_json(tree, shapes) for tree in request.get("boxes", ())]
        except (TypeError, ValueError) as error:
            raise RefusedError(str(error)) from error

    def _require(self) -> GlobalWeights:
        if self._weights is None:
            raise RefusedError("no site has joined yet")
        return self._weights

    def _is_after(self, base: int) -> bool:
        weights = self._weights
        return weights is not None and weights.is_ready and weights.number > base

    def _hear(self, site: int) -> None:
        if site not in self._active:
            self._keep_active(self._active | {site})


def _built(run: Mapping[str, Any], rules: Rules) -> GlobalWeights:
    shapes = {str(name): tuple(map(int, shape)) for name, shape in run["parameters"]}
    return GlobalWeights(shapes, _section(run), absolute=not rules.is_asynchronous)


def staleness_weight(staleness: int) -> float:
    """How much a change counts that is relative to weights of so many outer steps ago.

    ``(1 + s)^-0.5``: the polynomial weight of FedAsync (Xie et al. 2019, arXiv 1903.03934).
    """
    return float((1 + staleness) ** -0.5)


def _refuse_index(site: int, count: int) -> None:
    if not 0 <= site < count:
        raise RefusedError(f"sites.index = {site}: sites.count = {count} has 0 to {count - 1}")


def _refuse_numbers(delivery: Delivery) -> None:
    if not _ATTEMPT.fullmatch(delivery.attempt):
        raise RefusedError(f"attempt {delivery.attempt[:40]!r}")
    for name, value, least, most in (
        ("tokens", delivery.tokens, 1, MOST_TOKENS),
        ("step", delivery.step, 0, MOST_STEP),
        ("base", delivery.base, 0, MOST_STEP),
        ("num_messages", delivery.num_messages, 1, MOST_STEP),
    ):
        if not least <= value <= most:
            raise RefusedError(f"{name} = {_shown(value)}: {least} to {most:,} are possible")


def _section(run: Mapping[str, Any]) -> SitesSection:
    """How outer steps are made, as a section, which names a server."""
    own = {"server": "http://localhost:1", "token_file": "none"}
    return SitesSection.model_validate({**run["sites"], **own})


def _facts_of(run: Mapping[str, Any]) -> dict[str, Any]:
    return {**run["facts"], "parameters": run["parameters"], "sites": run["sites"]}


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


def _named(sites: Iterable[int]) -> str:
    numbers = ", ".join(map(str, sorted(sites)))
    return f"site {numbers}" if numbers else "no site"
