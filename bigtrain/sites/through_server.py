"""Outer steps through a server, which holds the global weights and the outer momentum."""

from __future__ import annotations

import functools
import secrets
import time

import torch

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.attempt import Attempt
from bigtrain.sites.client import DetachedError, RefusedByServerError
from bigtrain.sites.codecs import CODECS, FloatCodec, is_finite
from bigtrain.sites.contribution import decoded
from bigtrain.sites.membership import Membership, poll_seconds
from bigtrain.sites.metrics import LEFT_OUT, RETURNED, OuterEvent, square
from bigtrain.sites.outer_state import Bucket, OuterState, packed, unpacked
from bigtrain.sites.protocol import Header, StepRecord
from bigtrain.sites.rectangles import ParameterBox, split_cuts
from bigtrain.sites.site_ranks import SiteRanks

_TRIES = 3
_PLAIN = FloatCodec(torch.float32, is_relative=False)


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
        self._is_absolute = True  # a synchronous server takes weights instead of differences
        self._heard = 0  # the outer step up to which the server has sent its events

    def begin(self, header: Header) -> None:
        """Join the server by a request with the fields of `header`, and upload the initial weights
        if it asks for them. Raises LaunchError."""
        membership = self._membership
        for tries_left in reversed(range(_TRIES)):
            reply = self._ranks.on_main(lambda: membership.join(header))
            self._is_new, self._is_absolute = header["is_new"], not reply["is_asynchronous"]
            try:
                if reply["uploads"]:
                    self._ranks.agreed(self._upload)
                    self._ranks.on_main(lambda: membership.ask("uploaded", {}))
                return
            except RefusedByServerError:
                # A server that has started again has no initial weights, and asks who joins next.
                if not tries_left:
                    raise

    def make(self, attempt: Attempt) -> None:
        """Fill in the results of an attempt. Raises LaunchError."""
        deadline = self._membership.deadline()
        try:
            if attempt.fragment is None:
                self._resync(attempt, deadline)
            else:
                self._take_part(attempt, deadline)
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

    def _take_part(self, attempt: Attempt, deadline: float) -> None:
        name, before = self._ranks.on_main(lambda: secrets.token_hex(8)), self._membership.num_bytes
        own_messages = self._ranks.agreed(lambda: self._contribute(attempt, name, deadline))
        attempt.num_bytes = self._membership.num_bytes - before
        started_at = time.perf_counter()
        num_messages = sum(self._ranks.gathered(own_messages))
        current = self._ranks.on_main(lambda: self._deliver(attempt, name, num_messages, deadline))
        attempt.waited = time.perf_counter() - started_at
        took_part = self._sites.index in current["sites"] and not current.get("late")
        current = self._receive(attempt, current, deadline, is_update=took_part)
        attempt.events += [OuterEvent(**event) for event in current.get("events", ())]
        self._heard = int(current["number"])
        if not took_part:
            attempt.errors = ()  # what was rounded off with a change that nobody has used
            reason = f"missed outer step {attempt.number + 1}; loaded the weights of outer step"
            reason += f" {current['number']}"
            attempt.events.append(self._site_event(LEFT_OUT, reason, current))
            attempt.notes.append(f"{reason}; this site's own change is discarded")
        attempt.record = StepRecord.model_validate({**current, "fragment": 0})

    def _site_event(self, event_kind: str, reason: str, current: Header) -> OuterEvent:
        return OuterEvent(event_kind, f"site {self._sites.index}", reason, int(current["number"]))

    # Requests

    def _own_boxes(
        self, bucket: Bucket, flat: torch.Tensor, *, primary: bool
    ) -> tuple[list[tuple[ParameterBox, tuple[int, ...]]], list[torch.Tensor]]:
        """Return the rectangles of this rank's own share of a tensor in the order of a bucket, with
        the shapes of their parameters; and their views."""
        cuts = list(bucket.boxes(flat, self.state.own(len(flat)), primary=primary))
        return [(box, shape) for box, shape, _ in cuts], [view for _, _, view in cuts]

    def _upload(self) -> None:
        """Send this rank's part of the initial weights."""
        for bucket in self.state.buckets(0):
            boxes, views = self._own_boxes(bucket, bucket.weights, primary=True)
            if boxes:
                header = {"boxes": [box.to_json() for box, _ in boxes]}
                payload = packed(views).numpy().tobytes()
                self._membership.ask("upload", header, payload=payload)

    def _contribute(self, attempt: Attempt, name: str, deadline: float) -> int:
        """Send what this rank's masters have changed since the last outer step; return the number
        of messages."""
        codec, errors, num_messages = CODECS[self._sites.codec], [], 0
        relative = codec.is_relative or not self._is_absolute
        for part, bucket in enumerate(self.state.buckets(0)):
            # What has changed, with what earlier messages have rounded off.
            local = bucket.gathered()
            attempt.squares[0] += square(local, bucket.weights)
            attempt.squares[2] += len(local)
            change = local - bucket.weights if relative else local
            error = None
            if bucket.error is not None:
                change += bucket.error
                error = bucket.error.clone()
            errors.append(error)
            boxes, views = self._own_boxes(bucket, change, primary=True)
            if not boxes:
                continue
            values = packed(views).unsqueeze(0)
            codes = codec.encode(values)
            part_key = {"attempt": name, "rank": self._ranks.rank, "part": part}
            header = {**part_key, "boxes": [box.to_json() for box, _ in boxes]}
            self._membership.ask("contribute", header, deadline, codes[0].numpy().tobytes())
            num_messages += 1
            if error is not None:  # error feedback: what the server does not get
                rounding = (values - decoded(codec, codes, values.shape[1]))[0]
                _, views = self._own_boxes(bucket, error, primary=True)
                for view, value in unpacked(rounding, views):
                    view.copy_(value)
        attempt.errors = errors
        return num_messages

    def _deliver(self, attempt: Attempt, name: str, num_messages: int, deadline: float) -> Header:
        """Report that all parts are sent; return the server's state after an outer step."""
        header = {
            "attempt": name,
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
        """Receive the global weights of the outer step in `current`, as an update if this rank has
        the weights before it; return the state that they are of, which may be a newer one."""
        buckets = list(self.state.buckets(0))
        for tries_left in reversed(range(_TRIES)):
            number = int(current["number"])
            form = "update" if is_update and number == attempt.number + 1 else "full"

            def fetch(number: int = number, form: str = form) -> list[torch.Tensor]:
                return [self._fetched(bucket, number, form, deadline) for bucket in buckets]

            try:
                weights = self._ranks.agreed(fetch)
                break
            except DetachedError:
                # The server may have made another step meanwhile, which one site cannot hold up.
                if not tries_left:
                    raise
                last = number - 1
                current = self._ranks.on_main(functools.partial(self._wait, last, deadline))
        attempt.received = [(bucket_weights, None) for bucket_weights in weights]
        return current

    def _fetched(self, bucket: Bucket, number: int, form: str, deadline: float) -> torch.Tensor:
        """Return the new global weights of a bucket, of which this rank's own share is filled."""
        new = bucket.weights.clone()
        boxes, views = self._own_boxes(bucket, new, primary=False)
        if not boxes:
            return new
        header = {"number": number, "form": form, "boxes": [box.to_json() for box, _ in boxes]}
        reply, payload = self._membership.fetch("weights", header, deadline)
        is_update = reply["form"] == "update"
        codec = CODECS[self._sites.codec] if is_update else _PLAIN
        values = split_cuts(codec, payload, boxes)
        if not is_finite(values):
            raise DetachedError(
                f"{self._sites.server} sent weights of outer step {number} that are not finite, "
                "which this site does not take"
            )
        for view, value in unpacked(values, views):
            view.copy_(view + value if is_update and codec.is_relative else value)
        return new


def full_shapes(engine: TrainEngine, ranks: SiteRanks) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each trained parameter of all pipeline stages by its name; (1,) for
    a scalar. Collective."""
    own_shapes = {
        name: tuple(full_shape(parameter)) or (1,)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    return {name: shape for shapes in ranks.gathered(own_shapes) for name, shape in shapes.items()}
