"""Outer steps through a server, which holds the global weights and the outer momentum."""

from __future__ import annotations

import functools
import secrets
import time
from itertools import chain

import torch

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.attempt import Attempt, BucketState
from bigtrain.sites.client import DetachedError, RefusedByServerError
from bigtrain.sites.codecs import CODECS, FloatCodec, is_finite
from bigtrain.sites.contribution import decoded
from bigtrain.sites.membership import Membership, poll_seconds
from bigtrain.sites.metrics import LEFT_OUT, RETURNED, OuterEvent, square
from bigtrain.sites.outer_state import (
    Bucket,
    OuterState,
    RectangleView,
    pack_views,
    unpack_views,
)
from bigtrain.sites.protocol import Header, StepRecord
from bigtrain.sites.rectangles import decode_rectangles
from bigtrain.sites.site_ranks import SiteRanks

_TRIES = 3
_FLOAT32 = FloatCodec(torch.float32, is_relative=False)


class ServerSteps:
    """Outer steps by sending this site's change to the server and taking the server's weights.

    A site that missed an outer step takes the server's newest weights, and its change is lost.
    """

    def __init__(
        self,
        engine: TrainEngine,
        sites: SitesSection,
        ranks: SiteRanks,
        membership: Membership,
    ) -> None:
        self._sites = sites
        self._ranks = ranks
        self._membership = membership
        self.state = OuterState(engine, sites)
        self._is_new = False
        self._takes_weights = True  # a synchronous server; an asynchronous one takes differences
        self._heard = 0  # the outer step up to which the server has sent its events

    def begin(self, header: Header) -> None:
        """Join the server by a request with the fields of `header`, and upload the initial weights
        if it asks for them. Raises LaunchError."""
        membership = self._membership
        for tries_left in reversed(range(_TRIES)):
            reply = self._ranks.on_main(lambda: membership.join(header))
            self._is_new, self._takes_weights = header["is_new"], not reply["is_asynchronous"]
            try:
                if reply["uploads"]:
                    self._ranks.on_all(self._upload)
                    self._ranks.on_main(lambda: membership.ask("uploaded", {}))
                return
            except RefusedByServerError:
                # The server has started again, and asks the next site that joins for the weights.
                if not tries_left:
                    raise

    def make(self, attempt: Attempt) -> None:
        """Fill in the results of an attempt. Raises LaunchError."""
        deadline = self._membership.deadline()
        try:
            if attempt.fragment is None:
                self._resync(attempt, deadline)
            else:
                self._exchange_change(attempt, deadline)
        except DetachedError as error:
            attempt.detach_reason = str(error)

    def _resync(self, attempt: Attempt, deadline: float) -> None:
        """Take the server's weights at the beginning, if this site has other weights."""
        current = self._ranks.on_main(lambda: self._wait(-1, deadline))
        if attempt.number > current["number"]:
            raise LaunchError(
                f"this site was at outer step {attempt.number}, and the server at "
                f"{self._sites.server} is at {current['number']} -> start the server with the "
                "directory it had"
            )
        self._heard = int(current["number"]) if self._is_new else attempt.number
        if self._is_new or attempt.number != current["number"]:
            current = self._receive(attempt, current, deadline, is_update=False)
        if attempt.number != current["number"]:
            reason = f"took the global weights of outer step {current['number']}"
            attempt.events.append(self._site_event(RETURNED, reason, current))
        attempt.record = StepRecord.model_validate(current)

    def _exchange_change(self, attempt: Attempt, deadline: float) -> None:
        """Send this site's change, and take the weights of the next outer step."""
        attempt_id = self._ranks.on_main(lambda: secrets.token_hex(8))
        bytes_before = self._membership.num_bytes
        rank_messages = self._ranks.on_all(lambda: self._contribute(attempt, attempt_id, deadline))
        attempt.num_bytes = self._membership.num_bytes - bytes_before
        started_at = time.perf_counter()
        num_messages = sum(self._ranks.all_gather(rank_messages))
        current = self._ranks.on_main(
            lambda: self._deliver(attempt, attempt_id, num_messages, deadline)
        )
        attempt.waited = time.perf_counter() - started_at
        took_part = self._sites.index in current["sites"] and not current.get("late")
        current = self._receive(attempt, current, deadline, is_update=took_part)
        attempt.events += [OuterEvent(**event) for event in current.get("events", ())]
        self._heard = int(current["number"])
        if not took_part:
            attempt.errors = ()  # the change was not used, so its rounding errors do not count
            reason = f"missed outer step {attempt.number + 1}; loaded the weights of outer step"
            reason += f" {current['number']}"
            attempt.events.append(self._site_event(LEFT_OUT, reason, current))
            attempt.notes.append(f"{reason}; this site's own change is discarded")
        attempt.record = StepRecord.model_validate({**current, "fragment": 0})

    def _site_event(self, event_kind: str, reason: str, current: Header) -> OuterEvent:
        return OuterEvent(event_kind, f"site {self._sites.index}", reason, int(current["number"]))

    # Requests

    def _own_rectangles(
        self, bucket: Bucket, flat: torch.Tensor, *, primary: bool
    ) -> list[RectangleView]:
        """Return the rectangles of this rank's share of `flat`, in the order of the bucket."""
        return list(bucket.rectangles(flat, self.state.own_slice(len(flat)), primary=primary))

    def _upload(self) -> None:
        """Send this rank's part of the initial weights."""
        for bucket in self.state.buckets(0):
            rectangles = self._own_rectangles(bucket, bucket.weights, primary=True)
            if rectangles:
                header = {"boxes": [rectangle.box.to_json() for rectangle in rectangles]}
                values = pack_views(rectangle.view for rectangle in rectangles)
                self._membership.ask("upload", header, payload=values.numpy().tobytes())

    def _contribute(self, attempt: Attempt, attempt_id: str, deadline: float) -> int:
        """Send the change of this rank's masters since the last outer step; return the number of
        messages."""
        codec, errors, num_messages = CODECS[self._sites.codec], [], 0
        sends_change = codec.is_relative or not self._takes_weights
        for part, bucket in enumerate(self.state.buckets(0)):
            # The change, or the weights, and the rounding error of earlier messages.
            local = bucket.copy_masters()
            attempt.squares.change += square(local, bucket.weights)
            attempt.squares.num_elements += len(local)
            sent = local - bucket.weights if sends_change else local
            error = None
            if bucket.error is not None:
                sent += bucket.error
                error = bucket.error.clone()
            errors.append(error)
            rectangles = self._own_rectangles(bucket, sent, primary=True)
            if not rectangles:
                continue
            values = pack_views(rectangle.view for rectangle in rectangles).unsqueeze(0)
            codes = codec.encode(values)
            part_key = {"attempt": attempt_id, "rank": self._ranks.rank, "part": part}
            header = {**part_key, "boxes": [rectangle.box.to_json() for rectangle in rectangles]}
            self._membership.ask("contribute", header, deadline, codes[0].numpy().tobytes())
            num_messages += 1
            if error is not None:  # error feedback: the difference to the values that are received
                rounding = (values - decoded(codec, codes, values.shape[1]))[0]
                rectangles = self._own_rectangles(bucket, error, primary=True)
                error_views = [rectangle.view for rectangle in rectangles]
                for view, value in unpack_views(rounding, error_views):
                    view.copy_(value)
        attempt.errors = errors
        return num_messages

    def _deliver(
        self, attempt: Attempt, attempt_id: str, num_messages: int, deadline: float
    ) -> Header:
        """Report that all parts are sent; return the server's state after an outer step."""
        header = {
            "attempt": attempt_id,
            "base": attempt.number,
            "step": attempt.step,
            "last_step": attempt.last_step,
            "tokens": max(1, attempt.tokens),
            "num_messages": num_messages,
            "heard": self._heard,
        }
        current = self._membership.ask("deliver", header, deadline)
        if current.get("late") or current["number"] > attempt.number:
            return current
        return self._wait(attempt.number, deadline)

    def _wait(self, base: int, deadline: float) -> Header:
        """Return the server's state once it has weights of an outer step after `base`."""
        while True:
            header = {"base": base, "seconds": poll_seconds(deadline), "heard": self._heard}
            current = self._membership.ask("wait", header, deadline)
            if current["is_ready"] and current["number"] > base:
                return current
            if time.monotonic() > deadline - 1:
                raise DetachedError(f"{self._sites.server} made no outer step in time")

    def _receive(
        self, attempt: Attempt, current: Header, deadline: float, *, is_update: bool
    ) -> Header:
        """Receive the global weights of the state `current`, or of a newer state; return that
        state. is_update: an update suffices, since this rank has the weights before `current`."""
        buckets = list(self.state.buckets(0))
        for tries_left in reversed(range(_TRIES)):
            number = int(current["number"])
            form = "update" if is_update and number == attempt.number + 1 else "full"

            def fetch(number: int = number, form: str = form) -> list[torch.Tensor]:
                return [self._fetch_bucket(bucket, number, form, deadline) for bucket in buckets]

            try:
                weights = self._ranks.on_all(fetch)
                break
            except DetachedError:
                # The server may have made another step meanwhile, which one site cannot hold up.
                if not tries_left:
                    raise
                wait = functools.partial(self._wait, number - 1, deadline)
                current = self._ranks.on_main(wait)
        attempt.received = [BucketState(bucket_weights, None) for bucket_weights in weights]
        return current

    def _fetch_bucket(
        self, bucket: Bucket, number: int, form: str, deadline: float
    ) -> torch.Tensor:
        """Return the global weights [N] of a bucket after outer step `number`, for this rank's
        share; other elements are the old weights. form: of the request."""
        new = bucket.weights.clone()
        rectangles = self._own_rectangles(bucket, new, primary=False)
        if not rectangles:
            return new
        boxes = [rectangle.box.to_json() for rectangle in rectangles]
        header = {"number": number, "form": form, "boxes": boxes}
        reply, payload = self._membership.fetch("weights", header, deadline)
        is_update = reply["form"] == "update"  # the server may send full weights instead
        codec = CODECS[self._sites.codec] if is_update else _FLOAT32
        values = decode_rectangles(codec, payload, [(r.box, r.shape) for r in rectangles])
        if not is_finite(values):
            raise DetachedError(
                f"{self._sites.server} sent weights of outer step {number} that are not finite, "
                "which this site does not take"
            )
        for view, value in unpack_views(values, [rectangle.view for rectangle in rectangles]):
            view.copy_(view + value if is_update and codec.is_relative else value)
        return new


def full_shapes(engine: TrainEngine, ranks: SiteRanks) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each trained parameter of all pipeline stages by its name; (1,) for
    a scalar. Collective."""
    rank_shapes = {
        name: tuple(full_shape(parameter)) or (1,)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    return dict(chain.from_iterable(shapes.items() for shapes in ranks.all_gather(rank_shapes)))
