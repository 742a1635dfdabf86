"""Rounds of the exchange by way of the server: initial weights, contributions of the sites, and the
outer steps that the server makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.contribution import UnusableError
from bigtrain.sites.metrics import LEFT_OUT, OuterEvent
from bigtrain.sites.protocol import Header, RefusedError, unpack
from bigtrain.sites.rectangles import Box
from bigtrain.sites.server.global_weights import GlobalWeights, NextStep
from bigtrain.sites.server.members import (
    UNUSABLE,
    Members,
    events_of,
    named,
)
from bigtrain.sites.server.store import Delivery


class ServerExchange:
    """The global weights of a run, and the deliveries for the next outer step.

    run: its description. Deliveries are in the store only.
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
                f"outer step {self._weights.number}, with deliveries of {named(delivered)} for the "
                "next one"
            )

    # Requests

    def act(
        self, action: str, header: Header, payload: memoryview, body: bytes | bytearray
    ) -> tuple[Header, bytes]:
        """Return header and payload of the reply to a request."""
        site = header["site"]
        if action == "weights":
            return self.cut(header)
        if action == "deliver":
            return self.deliver(site, header), b""
        if action == "contribute":
            self.contribute(site, header, payload, body)
        elif action == "upload":
            self.upload(site, header, payload)
        elif action == "uploaded":
            self.uploaded()
        else:
            raise RefusedError(
                f"{action}: the sites of this run have sites.exchange = server, not direct"
            )
        return {}, b""

    def joined(self, site: int, request: Header) -> Header:
        """Ask one site for the initial weights."""
        run = self._store.run()
        assert run is not None
        self._weights.sites = _section(run)  # which a site may have changed
        if not self._weights.is_ready and self._uploader in (None, site):
            self._uploader = site
            self._weights.begin_again()  # what an upload before has sent counts no longer
        uploads = self._uploader == site and not self._weights.is_ready
        return {"uploads": uploads, "needs_layout": False}

    def left(self, site: int, reason: str) -> None:
        """Continue without a site: `tick` does."""

    def upload(self, site: int, request: Header, payload: memoryview) -> None:
        """Take initial weights from the site that was asked for them."""
        with self._members.changed:
            if self._weights.is_ready:
                raise RefusedError("the initial weights are there")
            if self._uploader != site:  # two that differ would mix
                raise RefusedError(f"site {site} was not asked for the initial weights")
            if len(payload) % 4 or not payload:
                raise RefusedError(f"{len(payload)} bytes are not float32 values")
            values = torch.frombuffer(bytearray(payload), dtype=torch.float32)
            try:
                self._weights.begin(self._boxes(request), values)
            except ValueError as error:
                raise RefusedError(str(error)) from error

    def uploaded(self) -> None:
        """Count the initial weights as complete. Raises RefusedError if they are not."""
        with self._members.changed:
            weights = self._weights
            if weights.is_ready:
                return
            try:
                weights.refuse_unfilled()
            except ValueError as error:
                raise RefusedError(str(error)) from error
            told = self._members.pending()
            record = {**weights.record, "events": [asdict(one) for one in events_of(told, 0)]}
            self._members.write_round(record, (), told, tensors=weights.tensors())
            weights.ready()

    def contribute(
        self, site: int, request: Header, payload: memoryview, body: bytes | bytearray
    ) -> None:
        """Store a message with a part of what a site has changed, as it came."""
        try:
            self._weights.refuse_payload(self._boxes(request), payload)
        except UnusableError as error:
            raise self._refused_unusable(site, error) from error
        except ValueError as error:
            raise RefusedError(str(error)) from error
        key = str(request["attempt"]), int(request["rank"]), int(request["part"])
        self._store.write_part(site, key, body)

    def deliver(self, site: int, request: Header) -> Header:
        """Count a site's contribution as complete. Returns the state, with ``late`` where the outer
        step that it was meant for was made without it. Raises RefusedError for missing parts."""
        with self._members.changed:
            names = ("attempt", "base", "step", "tokens", "num_messages")
            delivery = Delivery(**{name: request[name] for name in names})
            heard = request.get("heard")
            heard = delivery.base if heard is None else int(heard)
            row = self._members.row(site)
            if not row.is_active:
                self._store.write_site(replace(row, is_active=True, has_left=False))
            if self._was_used(site, delivery):  # the reply was lost
                return self._members.summary(heard)
            staleness = self._weights.number - delivery.base
            if staleness < 0 or (staleness > 0 and not self._is_asynchronous):
                self._store.forget([site])
                self._members.note(LEFT_OUT, f"site {site}", "late")
                self._members.log(
                    f"site {site} was late for outer step {delivery.base + 1}: its change is "
                    f"discarded, it takes the weights of {self._weights.number}"
                )
                return {**self._members.summary(heard), "late": True}
            try:  # every element once, else the mean would be of something else than the model
                self._weights.refuse_contribution(partial(self._read, site, delivery))
            except UnusableError as error:
                raise self._refused_unusable(site, error) from error
            except ValueError as error:
                raise RefusedError(str(error)) from error
            self._store.deliver(site, delivery)
            self._unusable.discard(site)
            if self._waits_since is None:
                self._waits_since = self._members.clock()
            self._members.attempt(self.tick)
            return self._members.summary(heard)

    def cut(self, request: Header) -> tuple[Header, bytes]:
        """Return rectangles of the global weights of outer step ``number``: the last ``update``,
        encoded, or ``full``, in float32. Raises RefusedError if another step was made meanwhile."""
        with self._members.changed:
            weights = self._weights
            if request.get("number") != weights.number or not weights.is_ready:
                raise RefusedError(f"outer step {weights.number} was made meanwhile")
            form = "full" if request.get("form") != "update" else "update"
            return weights.cut(self._boxes(request), form)

    # Outer steps

    def tick(self) -> None:
        """Make the outer steps for which no site is waited for any longer."""
        while self._weights.is_ready and (delivered := self._store.deliveries()):
            absent = self._absent(delivered)
            if absent is None:
                return
            self._make_step(delivered, absent)

    def _absent(self, delivered: Mapping[int, Delivery]) -> set[int] | None:
        """Return the sites that an outer step is made without now; None if none is due."""
        if self._is_asynchronous:
            return set()
        members = self._members
        rows = self._store.sites()
        expected = {site for site, row in rows.items() if row.is_active}
        if self._weights.number == 0:  # all start at about the same time
            expected |= set(range(self._weights.sites.count))
        expected |= delivered.keys()
        absent = expected - delivered.keys() - self._unusable
        if self._waits_since is None:
            self._waits_since = members.clock()
        if members.clock() - self._waits_since >= members.rules.window_seconds:
            return absent
        waits = any(members.is_alive(site, has_heartbeat=False) for site in absent)
        return None if waits else absent

    def _make_step(self, delivered: dict[int, Delivery], absent: set[int]) -> None:
        """Make one outer step: on disk, then in memory."""
        if self._is_asynchronous:
            first = min(delivered)
            delivered = {first: delivered[first]}
        after = self._computed(delivered)
        if after is None:  # a delivery was set aside
            return
        members, number = self._members, self._weights.number + 1
        told = members.pending()
        events = events_of(told, number - 1)
        before = self._store.sites()
        for site in sorted(absent):
            refusal = "" if site in before else members.refused.get(site, "")
            reason = f"was refused: {refusal}" if refusal else "missed the outer step"
            events.append(OuterEvent(LEFT_OUT, f"site {site}", reason, number - 1))
        after.record["events"] = [asdict(event) for event in events]
        after.record["attempts"] = {str(site): one.attempt for site, one in delivered.items()}
        rows = [
            replace(
                row,
                is_active=row.is_active and site not in absent,
                number=number if site in delivered else row.number,
            )
            for site, row in before.items()
        ]
        members.write_round(after.record, rows, told, tensors=after.tensors, used=list(delivered))
        self._weights.commit(after)
        self._unusable.clear()
        self._waits_since = None
        if absent:
            members.log(
                f"{named(absent)} missed outer step {number} by more than "
                f"{members.rules.window_seconds:g} s: not waited for until they are back"
            )
        members.log(f"outer step {number} with {named(delivered)}")

    def _computed(self, delivered: Mapping[int, Delivery]) -> NextStep | None:
        """Return the state after a step with these; None where one of them, set aside, makes it
        fail."""
        weights = self._weights
        share = 1.0
        if self._is_asynchronous:
            ((_, one),) = delivered.items()
            num_active = sum(row.is_active for row in self._store.sites().values())
            share = staleness_weight(weights.number - one.base) / max(1, num_active)

        def computed(of: Mapping[int, Delivery]) -> NextStep:
            return weights.step(
                {site: one.tokens for site, one in of.items()},
                {site: partial(self._read, site, one) for site, one in of.items()},
                share,
                max(one.step for one in of.values()),
            )

        try:
            return computed(delivered)
        except (MemoryError, OSError):
            files = [path for site, one in delivered.items() for path in self._files(site, one)]
            if all(path.exists() for path in files):
                raise
            error: Exception = FileNotFoundError("a message is gone")
        except Exception as failure:
            error = failure
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
        place = self._store.set_aside(site)
        self._unusable.add(site)
        self._members.note(LEFT_OUT, f"site {site}", "its delivery makes the outer step fail")
        self._members.log(
            f"site {site} is excluded from outer step {self._weights.number + 1}, which cannot be "
            f"made with its delivery ({error!r}): set aside in {place}"
        )

    def _refused_unusable(self, site: int, error: UnusableError) -> RefusedError:
        """Exclude a site from the next outer step; return the refusal."""
        with self._members.changed:
            if site not in self._store.deliveries():  # what was confirmed before stays
                with self._store.transaction():
                    self._store.forget([site])
                    row = replace(self._members.row(site), is_active=False)
                    self._store.write_site(row)
                self._unusable.add(site)
            self._members.note(LEFT_OUT, f"site {site}", UNUSABLE)
            number = self._weights.number + 1
            self._members.log(f"site {site} is excluded from outer step {number}: it sent {error}")
            self._members.attempt(self.tick)
        return RefusedError(f"site {site} sent {error}: it is excluded")

    def _was_used(self, site: int, delivery: Delivery) -> bool:
        """Return whether an outer step was made with an attempt."""
        return any(
            record.get("attempts", {}).get(str(site)) == delivery.attempt
            for record in self._store.records_after(delivery.base)
        )

    def _files(self, site: int, delivery: Delivery) -> list[Path]:
        return self._store.parts(site, delivery.attempt)

    def _read(self, site: int, delivery: Delivery) -> Iterator[tuple[list[Box], memoryview]]:
        """Yield the messages of a delivery, one at a time in memory. Raises RefusedError if some
        are missing."""
        files = self._files(site, delivery)
        if len(files) != delivery.num_messages:
            raise RefusedError(f"{len(files)} of {delivery.num_messages} messages are here")
        for path in files:
            header, payload = unpack(path.read_bytes())
            yield self._boxes(header), payload

    def _boxes(self, request: Header) -> list[Box]:
        try:
            return [Box.from_json(tree, self._weights.shapes) for tree in request.get("boxes", ())]
        except (TypeError, ValueError) as error:
            raise RefusedError(str(error)) from error


def _section(run: Header) -> SitesSection:
    """Return how outer steps are made, as a section, which names a server."""
    own = {"server": "http://localhost:1", "token_file": "none"}
    return SitesSection.model_validate({**run["sites"], **own})


def staleness_weight(staleness: int) -> float:
    """Return how much a change counts that is relative to weights of so many outer steps ago.

    ``(1 + s)^-0.5``: the polynomial weight of FedAsync (Xie et al. 2019, arXiv 1903.03934).
    """
    return float((1 + staleness) ** -0.5)
