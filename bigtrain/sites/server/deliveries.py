"""Outer steps through the server: initial weights, contributions of the sites, and
outer steps with their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites import protocol
from bigtrain.sites.contribution import UnusableError
from bigtrain.sites.metrics import LEFT_OUT, OuterEvent
from bigtrain.sites.protocol import DeliverRequest, Header, RefusedError
from bigtrain.sites.rectangles import ParameterBox
from bigtrain.sites.server.global_weights import GlobalWeights, NextStep
from bigtrain.sites.server.members import UNUSABLE, Members, as_events, site_names

Reply = tuple[Header, bytes]


class ServerExchange:
    """The global weights of a run, and the deliveries for the next outer step.

    run: description of the run. Deliveries are in the store only.
    """

    def __init__(self, members: Members, run: Header) -> None:
        self._members = members
        self._store = members.store
        shapes = {str(name): tuple(map(int, shape)) for name, shape in run["parameters"]}
        self._is_asynchronous = members.rules.is_asynchronous
        self._weights = GlobalWeights(shapes, _section(run), absolute=not self._is_asynchronous)
        self._uploader: int | None = None
        self._unusable: set[int] = set()  # not waited for at the next outer step
        self._waits_since: float | None = None
        tensors, record = self._store.state(), self._store.record()
        if tensors is not None and record is not None:
            self._weights.restore(tensors, record)
            delivered = self._store.deliveries()
            self._waits_since = members.clock() if delivered else None
            members.log(
                f"outer step {self._weights.number}, with deliveries of {site_names(delivered)} "
                "for the next one"
            )
        self.handlers: dict[str, Callable[[Any, memoryview], Reply]] = {
            "upload": self._upload,
            "uploaded": self._uploaded,
            "contribute": self._contribute,
            "deliver": self._deliver,
            "weights": self._cut,
        }

    # Requests

    def joined(self, request: protocol.JoinRequest) -> Header:
        """Ask one site for the initial weights."""
        run = self._store.run()
        assert run is not None
        self._weights.sites = _section(run)  # which a site may have changed
        uploads = not self._weights.is_ready and self._uploader in (None, request.site)
        if uploads:
            self._uploader = request.site
            self._weights.begin_again()  # discard what an earlier upload has sent
        return {"uploads": uploads, "needs_layout": False}

    def left(self, site: int, reason: str) -> None:
        """Do nothing: `tick` makes outer steps without sites that have left."""

    def _upload(self, request: protocol.UploadRequest, payload: memoryview) -> Reply:
        """Take initial weights from the site that was asked for them."""
        with self._members.changed, _refusing():
            if self._weights.is_ready:
                raise RefusedError("the initial weights are there")
            if self._uploader != request.site:  # weights of two sites would mix
                raise RefusedError(f"site {request.site} was not asked for the initial weights")
            self._weights.begin(self._boxes(request.boxes), payload)
        return {}, b""

    def _uploaded(self, _: protocol.SiteRequest, __: memoryview) -> Reply:
        """Count the initial weights as complete. Raises RefusedError if they are not."""
        with self._members.changed, _refusing():
            weights = self._weights
            if not weights.is_ready:
                weights.refuse_unfilled()
                reported = self._members.pending()
                events = [asdict(event) for event in as_events(reported, 0)]
                record = {**weights.record, "events": events}
                self._members.write_step(record, reported, tensors=weights.tensors)
                weights.ready()
        return {}, b""

    def _contribute(self, request: protocol.ContributeRequest, payload: memoryview) -> Reply:
        """Store a message with a part of what a site has changed."""
        with self._excluding(request.site):
            self._weights.refuse_payload(self._boxes(request.boxes), payload)
        key = request.attempt, request.rank, request.part
        self._store.write_part(request.site, key, protocol.pack({"boxes": request.boxes}, payload))
        return {}, b""

    def _deliver(self, delivery: DeliverRequest, _: memoryview) -> Reply:
        """Count a site's contribution as complete. Return the state; it has ``late`` if the outer
        step for which the contribution was sent was made without it. Raises RefusedError for
        missing parts."""
        site, members = delivery.site, self._members
        heard_step = delivery.base if delivery.heard is None else delivery.heard
        with members.changed:
            row = members.member(site)
            if not row.is_active:
                self._store.write_site(replace(row, is_active=True, has_left=False))
            is_repeated = any(  # the reply to the first request was lost
                record.get("attempts", {}).get(str(site)) == delivery.attempt
                for record in self._store.records_after(delivery.base)
            )
            if is_repeated:
                return members.summary(heard_step), b""
            # Only an asynchronous server takes changes to older weights, until the run ends.
            staleness = self._weights.number - delivery.base
            has_ended = self._weights.record["ended_step"] >= delivery.last_step
            if staleness and (staleness < 0 or has_ended or not self._is_asynchronous):
                self._store.forget([site])
                members.note(LEFT_OUT, f"site {site}", "late")
                members.log(
                    f"site {site} was late for outer step {delivery.base + 1}: its change is "
                    f"discarded, it takes the weights of {self._weights.number}"
                )
                return {**members.summary(heard_step), "late": True}, b""
            with self._excluding(site):
                self._weights.refuse_contribution(partial(self._read, site, delivery))
            self._store.deliver(delivery)
            self._unusable.discard(site)
            if self._waits_since is None:
                self._waits_since = members.clock()
            members.attempt(self.tick)
            return members.summary(heard_step), b""

    def _cut(self, request: protocol.WeightsRequest, _: memoryview) -> Reply:
        """Return rectangles of the global weights of outer step ``number``: the last ``update``,
        encoded, or ``full``, in float32. Raises RefusedError if another step was made meanwhile."""
        with self._members.changed, _refusing():
            weights = self._weights
            if request.number != weights.number or not weights.is_ready:
                raise RefusedError(f"outer step {weights.number} was made meanwhile")
            return weights.cut(self._boxes(request.boxes), request.form)

    @contextmanager
    def _excluding(self, site: int) -> Iterator[None]:
        """Refuse the request if the block raises ValueError; if it raises UnusableError, exclude
        the site from the next outer step, too."""
        try:
            with _refusing():
                yield
        except UnusableError as error:
            members, number = self._members, self._weights.number + 1
            with members.changed:
                if site not in self._store.deliveries():  # a confirmed delivery stays
                    with self._store.transaction():
                        self._store.forget([site])
                        self._store.write_site(replace(members.member(site), is_active=False))
                    self._unusable.add(site)
                members.note(LEFT_OUT, f"site {site}", UNUSABLE)
                members.log(f"site {site} is excluded from outer step {number}: it sent {error}")
                members.attempt(self.tick)
            raise RefusedError(f"site {site} sent {error}: it is excluded") from error

    # Outer steps

    def tick(self) -> None:
        """Make the outer steps for which no site is waited for any longer."""
        while self._weights.is_ready and (delivered := self._store.deliveries()):
            last_step = min(delivery.last_step for delivery in delivered.values())
            if self._is_asynchronous and self._weights.record["ended_step"] >= last_step:
                self._store.forget(delivered)  # the sites take the weights with which the run ended
                return
            absent = self._absent(delivered)
            if absent is None:
                return
            if self._is_asynchronous:  # a step for every delivery
                first_site = min(delivered)
                delivered = {first_site: delivered[first_site]}
            self._make_step(delivered, absent)

    def _absent(self, delivered: Mapping[int, DeliverRequest]) -> set[int] | None:
        """Return the sites that an outer step is made without now; None if none is due."""
        if self._is_asynchronous:
            return set()
        members = self._members
        rows = self._store.sites()
        expected = {site for site, row in rows.items() if row.is_active}
        if self._weights.number == 0:  # sites that have not joined yet are about to start
            expected |= set(range(self._weights.sites.count))
        expected |= delivered.keys()
        absent = expected - delivered.keys() - self._unusable
        if self._waits_since is None:
            self._waits_since = members.clock()
        if members.clock() - self._waits_since >= members.rules.window_seconds:
            return absent
        # Sites that have not joined yet may do so until the window ends.
        waits = any(site not in rows or members.is_alive(site) for site in absent)
        return None if waits else absent

    def _make_step(self, delivered: dict[int, DeliverRequest], absent: set[int]) -> None:
        """Make one outer step: on disk, then in memory."""
        after = self._computed(delivered)
        if after is None:  # a delivery was discarded
            return
        members, last_number = self._members, self._weights.number
        reported = members.pending()
        events = as_events(reported, last_number)
        joined_sites = self._store.sites()
        for site in sorted(absent):
            # A site that has joined may have a refusal of an earlier request, which does not count.
            refusal = "" if site in joined_sites else members.refused.get(site, "")
            reason = f"was refused: {refusal}" if refusal else "missed the outer step"
            events.append(OuterEvent(LEFT_OUT, f"site {site}", reason, last_number))
        after.record["events"] = [asdict(event) for event in events]
        # The last optimizer step of the run, if this outer step reaches it; else 0.
        last_step = max(delivery.last_step for delivery in delivered.values())
        after.record["ended_step"] = last_step if after.record["step"] >= last_step else 0
        after.record["attempts"] = {
            str(site): delivery.attempt for site, delivery in delivered.items()
        }
        made_by = list(delivered)
        members.write_step(
            after.record, reported, made_by, absent, tensors=after.tensors, used=made_by
        )
        self._weights.commit(after)
        self._unusable.clear()
        self._waits_since = None
        if absent:
            members.log(
                f"{site_names(absent)} missed outer step {last_number + 1} by more than "
                f"{members.rules.window_seconds:g} s: not waited for until they are back"
            )
        members.log(f"outer step {last_number + 1} with {site_names(delivered)}")

    def _computed(self, delivered: Mapping[int, DeliverRequest]) -> NextStep | None:
        """Return the state after a step with these deliveries; if a delivery makes the step fail,
        discard it and return None."""
        try:
            return self._next(delivered)
        except Exception as error:
            _raise_temporary(error)
            culprit, cause = max(delivered), error  # unless a delivery fails by itself
        for site, delivery in delivered.items():
            try:
                self._next({site: delivery})
            except Exception as error:
                _raise_temporary(error)
                culprit, cause = site, error
                break
        self._store.forget([culprit])
        self._unusable.add(culprit)
        self._members.note(LEFT_OUT, f"site {culprit}", "its delivery makes the outer step fail")
        self._members.log(
            f"site {culprit} is excluded from outer step {self._weights.number + 1}, which cannot "
            f"be made with its delivery ({cause!r}): discarded"
        )
        return None

    def _next(self, delivered: Mapping[int, DeliverRequest]) -> NextStep:
        """Compute an outer step with these deliveries; changes nothing."""
        weights, share = self._weights, 1.0
        if self._is_asynchronous:
            ((_, delivery),) = delivered.items()
            num_active = sum(row.is_active for row in self._store.sites().values())
            share = staleness_weight(weights.number - delivery.base) / max(1, num_active)
        return weights.step(
            {site: delivery.tokens for site, delivery in delivered.items()},
            {site: partial(self._read, site, delivery) for site, delivery in delivered.items()},
            share,
            max(delivery.step for delivery in delivered.values()),
        )

    def _read(
        self, site: int, delivery: DeliverRequest
    ) -> Iterator[tuple[list[ParameterBox], memoryview]]:
        """Yield the messages of a delivery, one at a time in memory. Raises RefusedError if some
        are missing."""
        files = self._store.parts(site, delivery.attempt)
        if len(files) != delivery.num_messages:
            raise RefusedError(f"{len(files)} of {delivery.num_messages} messages are here")
        for path in files:
            header, payload = protocol.unpack(path.read_bytes())
            yield self._boxes(header["boxes"]), payload

    def _boxes(self, trees: Sequence[Any]) -> list[ParameterBox]:
        return [ParameterBox.from_json(tree, self._weights.shapes) for tree in trees]


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn a ValueError into a RefusedError; let an UnusableError pass, which is a ValueError."""
    try:
        yield
    except UnusableError:
        raise
    except ValueError as error:
        raise RefusedError(str(error)) from error


def _raise_temporary(error: Exception) -> None:
    """Raise `error` if the outer step may succeed when it is made again."""
    if isinstance(error, MemoryError | OSError) and not isinstance(error, FileNotFoundError):
        raise error


def _section(run: Header) -> SitesSection:
    """Return the run's settings of outer steps as a section."""
    # The section requires a server; these values are not used.
    server_fields = {"server": "http://localhost:1", "token_file": "none"}
    return SitesSection.model_validate({**run["sites"], **server_fields})


def staleness_weight(staleness: int) -> float:
    """Return the weight of a change relative to the global weights of `staleness` outer steps ago.

    ``(1 + s)^-0.5``: the polynomial weight of FedAsync (Xie et al. 2019, arXiv 1903.03934).
    """
    return float((1 + staleness) ** -0.5)
