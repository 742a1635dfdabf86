"""The outer step of a site that exchanges by an outer server (`sites.server`)."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError, TrainingError
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.client import (
    RefusedByServerError,
    ServerClient,
    UnreachableError,
    read_token,
)
from bigtrain.sites.codecs import CODECS, FloatCodec, is_finite
from bigtrain.sites.contribution import decoded, refuse_own_change
from bigtrain.sites.metrics import (
    ALONE,
    LEFT_OUT,
    RETURNED,
    OuterEvent,
    OuterStepMetrics,
    reduce_site_metrics,
    square,
)
from bigtrain.sites.outer_state import OuterState, Window
from bigtrain.sites.protocol import Header
from bigtrain.sites.rectangles import split_cuts
from bigtrain.system.world import World

_POLL_SECONDS = 15.0
_LEAVE_SECONDS = 5.0
_TRIES = 3
_PLAIN = FloatCodec(torch.float32, is_relative=False)
_MATHEMATICS = ("count", "inner_steps", "outer", "codec")

Result = TypeVar("Result")


class _AwayError(LaunchError):
    """The server cannot be reached, or goes on without this site, which goes on without it."""


@dataclass
class _Sent:
    """What one rank has sent: the changes' rounding errors by window, which count once the server
    has used them, and sums for the figures."""

    errors: list[torch.Tensor] = field(default_factory=list)
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    num_messages: int = 0


class ServerStep:
    """Moves the masters of one rank to the global weights of a server. Methods are collective over
    this site alone.

    A site that cannot reach the server, or has come too late for an outer step, goes on alone, and
    takes the weights of the server's newest step when it is back: its own change is lost then.
    facts: what all sites must have alike; allowed: which of them this one may change
    (``checkpoint.allow_changes``). run: the id of its run directory, on the main rank: a second one
    with the same ``sites.index`` is refused. notes: what happened and is to be shown; events: the
    same, and of other sites and the server, for the metrics. step: where the run stands after it
    was away; None where it has not moved.
    """

    def __init__(
        self,
        engine: TrainEngine,
        sites: SitesSection,
        world: World,
        facts: Mapping[str, Any],
        allowed: Sequence[str] = (),
        run: str = "",
    ) -> None:
        assert sites.server is not None
        assert sites.token_file is not None
        self.sites = sites
        self._engine = engine
        self._world = world
        self._facts, self._allowed = facts, allowed
        self._run = self._on_main(lambda: run)
        token = on_all_ranks(lambda: read_token(Path(sites.token_file or "")))
        certificate = None if sites.certificate_file is None else Path(sites.certificate_file)
        self._client = ServerClient(sites.server, token, certificate)
        self.state = OuterState(engine, sites)
        self._shapes = self._all_shapes()
        self.number = self.seen = 0  # the server's events say what the tokens do between sites
        self._base_step = 0
        self._absolute = True
        self.notes: list[str] = []
        self.events: list[OuterEvent] = []
        self._was_away = False
        self._heard = 0  # the outer step up to which the server has told its events
        self.step: int | None = None

    @property
    def under_way(self) -> tuple[int, int] | None:
        """Nothing is exchanged beside the steps."""
        return None

    def begin(
        self,
        number: int,
        step: int,
        *,
        is_new: bool,
        under_way: tuple[int, int] | None = None,
        seen: int = 0,
    ) -> None:
        """Begin after `number` outer steps and `step` steps, with the engine filled. The first site
        gives the server its weights; one that stands elsewhere than the server takes the server's.

        Raises LaunchError on every rank if the server cannot be reached, or serves another run.
        """
        assert under_way is None
        seconds = self.sites.timeout_seconds
        deadline = time.monotonic() + seconds
        found = self._on_main(lambda: self._join(deadline))
        if found["window_seconds"] >= seconds:
            raise LaunchError(
                f"sites.timeout_seconds = {seconds:g} is not more than the server's "
                f"--window-seconds = {found['window_seconds']:g}, so this site would never see a "
                "site that is missing left out -> a larger sites.timeout_seconds"
            )
        self._absolute = not found["is_asynchronous"]
        if is_new:
            for window in self.state.windows(0):
                window.weights.copy_(window.gathered())
        if found["uploads"]:
            on_all_ranks(lambda: self._upload(deadline))
            self._on_main(lambda: self._ask("uploaded", {}, deadline))
        found = self._on_main(lambda: self._wait(-1, deadline))
        if number > found["number"]:
            raise LaunchError(
                f"this site was at outer step {number}, and the server at {self.sites.server} is "
                f"at {found['number']} -> start the server with the directory it had"
            )
        self.number, self._base_step = number, int(found["step"])
        self._heard = int(found["number"]) if is_new else number
        if is_new or number != found["number"]:
            self._take(found, step, deadline)
        if number != found["number"]:
            self._happened(RETURNED, f"took the global weights of outer step {self.number}")

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `after_step` has something to do."""
        return bool(self.sites.sent_after(step, last_step))

    def after_step(self, step: int, last_step: int) -> list[OuterStepMetrics]:
        """The outer step after `step` of `last_step` steps, if the server makes it in time. Raises
        TrainingError on every rank if this site's change is not finite, or too large."""
        self._refuse_own_change(step)
        begun = time.perf_counter()
        deadline = time.monotonic() + self.sites.timeout_seconds
        before = self._client.num_bytes
        attempt = secrets.token_hex(8) if self._world.is_main else ""
        attempt = self._on_main(lambda: attempt)
        try:
            sent = on_all_ranks(lambda: self._contribute(attempt, deadline))
            num_bytes = self._client.num_bytes - before
            waiting = time.perf_counter()
            num_messages = self._total(sent.num_messages)
            found = self._on_main(lambda: self._deliver(attempt, step, num_messages, deadline))
            waited = time.perf_counter() - waiting
            base = self.number
            took_part = self.sites.index in found["sites"] and not found.get("late")
            self._take(found, step, deadline, errors=sent.errors if took_part else None)
        except _AwayError as error:
            self._was_away = True
            self._happened(ALONE, str(error))
            self.notes.append(
                f"step {step}: no outer step after {self.number}: {error}; this site goes on alone"
            )
            return []
        for told in found.get("events", ()):
            self.events.append(OuterEvent(**told))
        self._heard = int(found["number"])
        if took_part and self._was_away:
            self._happened(RETURNED, "takes part again")
        self._was_away = not took_part
        if not took_part:
            own = f"too late for outer step {base + 1}, took the weights of {self.number}"
            self._happened(LEFT_OUT, own)
            self.notes.append(
                f"step {step}: too late for outer step {base + 1}; this site took the weights of "
                f"{self.number}, and its own change of {step - self._base_step} steps is left out"
            )
        return [self._figures(found, sent, num_bytes, time.perf_counter() - begun, waited)]

    def settle(self) -> list[OuterStepMetrics]:
        """Nothing is under way."""
        return []

    def close(self) -> None:
        """After the last step, or the last one before a stop: the server does not wait for this
        site any longer."""
        self._leave({})

    def _refuse_own_change(self, step: int) -> None:
        """Leave, and raise TrainingError on every rank, if no outer step may use the change."""
        try:
            refuse_own_change(
                self.state.windows(0), (), self.sites.index, step, self._engine.device
            )
        except TrainingError as error:
            self._leave({"reason": str(error.__cause__)})
            raise

    def _leave(self, header: Mapping[str, Any]) -> None:
        if self._world.is_main:
            try:
                self._ask("leave", {"run": self._run, **header}, time.monotonic() + _LEAVE_SECONDS)
            except _AwayError as error:
                self.notes.append(f"the server was not told that this site left: {error}")

    def _happened(self, event: str, reason: str) -> None:
        """To this site."""
        self.events.append(OuterEvent(event, f"site {self.sites.index}", reason, self.number))

    def _join(self, deadline: float) -> Header:
        """Join, with the names and shapes of what is trained."""
        sites = self.sites.model_dump(mode="json")
        header = {
            "run": self._run,
            "facts": dict(self._facts),
            "allowed": list(self._allowed),
            "sites": {key: sites[key] for key in _MATHEMATICS},
            "parameters": sorted(self._shapes.items()),
        }
        return self._ask("join", header, deadline)

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shapes of what is trained, on all pipeline stages. Collective over the site."""
        own = {
            name: tuple(full_shape(parameter)) or (1,)
            for name, parameter in self._engine.module.named_parameters()
            if parameter.requires_grad
        }
        everyones: list[dict[str, tuple[int, ...]]] = [{} for _ in range(self._world.size)]
        dist.all_gather_object(everyones, own)
        return {name: shape for shapes in everyones for name, shape in shapes.items()}

    def _upload(self, deadline: float) -> None:
        """Give the server this rank's part of the initial weights."""
        for window in self.state.windows(0):
            own = self.state.own(len(window.weights))
            found = list(window.boxes(window.weights, own, primary=True))
            if found:
                flat = torch.cat([view.reshape(-1) for _, _, view in found])
                header = {"boxes": [box.to_json() for box, _, _ in found]}
                self._ask("upload", header, deadline, flat.numpy().tobytes())

    def _contribute(self, attempt: str, deadline: float) -> _Sent:
        """Send what this rank's masters have changed since the last outer step."""
        sent, codec = _Sent(), CODECS[self.sites.codec]
        relative = codec.is_relative or not self._absolute
        for part, window in enumerate(self.state.windows(0)):
            local = window.gathered()
            own = self.state.own(len(local))
            sent.squares[0] += square(local, window.weights)
            sent.squares[2] += len(local)
            change = local - window.weights if relative else local
            if window.error is not None:
                change += window.error
            found = list(window.boxes(change, own, primary=True))
            if not found:
                sent.errors.append(torch.empty(0))
                continue
            values = torch.cat([view.reshape(-1) for _, _, view in found]).unsqueeze(0)
            codes = codec.encode(values)
            back = decoded(codec, codes, values.shape[1])  # what the server will read
            header = {
                "run": self._run,
                "attempt": attempt,
                "rank": self._world.rank,
                "part": part,
                "boxes": [box.to_json() for box, _, _ in found],
            }
            self._ask("contribute", header, deadline, codes[0].numpy().tobytes())
            sent.num_messages += 1
            if window.error is not None:
                sent.errors.append((values - back)[0])
        return sent

    def _deliver(self, attempt: str, step: int, num_messages: int, deadline: float) -> Header:
        """Say that all is there; returns the state after an outer step, when that is made."""
        tokens = (step - self._base_step) * self._engine.plan.site_tokens_per_step
        header = {
            "run": self._run,
            "attempt": attempt,
            "base": self.number,
            "step": step,
            "tokens": max(1, tokens),
            "num_messages": num_messages,
            "heard": self._heard,
        }
        found = self._ask("deliver", header, deadline)
        if found.get("late") or found["number"] > self.number:
            return found
        return self._wait(self.number, deadline)

    def _wait(self, base: int, deadline: float) -> Header:
        """The state once the server has weights of an outer step after `base`."""
        while True:
            header = {"base": base, "seconds": _POLL_SECONDS, "heard": self._heard}
            found = self._ask("wait", header, deadline)
            if found["is_ready"] and found["number"] > base:
                return found
            if time.monotonic() > deadline:
                raise _AwayError(f"{self.sites.server} made no outer step in time")

    def _take(
        self,
        found: Header,
        step: int,
        deadline: float,
        *,
        errors: list[torch.Tensor] | None = None,
    ) -> None:
        """Take the global weights of the outer step in `found`: as an update if this rank has those
        before it. errors: of what was sent, if it took part."""
        form = "update" if errors is not None and found["number"] == self.number + 1 else "full"

        def fetch() -> list[torch.Tensor]:
            windows = self.state.windows(0)
            return [self._fetched(window, found["number"], form, deadline) for window in windows]

        weights = None
        for tries_left in reversed(range(_TRIES)):
            try:
                weights = on_all_ranks(fetch)
                break
            except _AwayError:
                # The server may have made another step meanwhile, which one site cannot hold up.
                if not tries_left:
                    raise
                last = found["number"] - 1
                found = self._on_main(functools.partial(self._wait, last, deadline))
                form = "full"
        assert weights is not None
        for index, (window, new) in enumerate(zip(self.state.windows(0), weights, strict=True)):
            own = self.state.own(len(new))
            if self.state.replicas is not None:
                new = self.state.replicas.joined(new[own], len(new))
            window.weights.copy_(new)
            if errors is not None and window.error is not None:
                self._keep_errors(window, own, errors[index])
            window.merge(0.0)
        self._engine.refresh_parameters()
        self.number, self._base_step = int(found["number"]), int(found["step"])
        self.step = self._base_step if self._base_step > step else None
        if self.step is not None:
            self.notes.append(
                f"step {step}: the other sites are at step {self.step}, where this one goes on; "
                f"its share of the samples of {self.step - step} steps is left out"
            )

    def _fetched(self, window: Window, number: int, form: str, deadline: float) -> torch.Tensor:
        """The new global weights of a window, in this rank's own share of it."""
        new = window.weights.clone()
        found = list(window.boxes(new, self.state.own(len(new)), primary=False))
        if not found:
            return new
        header = {
            "number": number,
            "form": form,
            "boxes": [box.to_json() for box, _, _ in found],
        }
        reply, payload = self._request("weights", header, deadline)
        is_update = reply["form"] == "update"
        codec = CODECS[self.sites.codec] if is_update else _PLAIN
        values = split_cuts(codec, payload, [(box, shape) for box, shape, _ in found])
        if not is_finite(values):
            raise _AwayError(
                f"{self.sites.server} sent weights of outer step {number} that are not finite, "
                "which this site does not take"
            )
        begin = 0
        for box, _, view in found:
            value = values[begin : begin + box.count].view(box.sizes)
            view.copy_(view + value if is_update and codec.is_relative else value)
            begin += box.count
        return new

    def _keep_errors(self, window: Window, own: slice, errors: torch.Tensor) -> None:
        """What rounding has lost of what was sent becomes what is sent next."""
        assert window.error is not None
        begin = 0
        for box, _, view in window.boxes(window.error, own, primary=True):
            view.copy_(errors[begin : begin + box.count].view(box.sizes))
            begin += box.count
        if self.state.replicas is not None:
            window.error.copy_(self.state.replicas.joined(window.error[own], len(window.error)))

    def _ask(
        self, action: str, header: Mapping[str, Any], deadline: float, payload: bytes = b""
    ) -> Header:
        return self._request(action, header, deadline, payload)[0]

    def _request(
        self, action: str, header: Mapping[str, Any], deadline: float, payload: bytes = b""
    ) -> tuple[Header, memoryview]:
        header = {"site": self.sites.index, **header}
        try:
            return self._client.ask(action, header, payload, deadline=deadline)
        except (UnreachableError, RefusedByServerError) as error:
            raise _AwayError(str(error)) from error

    def _on_main(self, work: Callable[[], Result]) -> Result:
        """What `work` gives on the main rank, for all ranks."""
        found = on_all_ranks(lambda: work() if self._world.is_main else None)
        box: list[Any] = [found]
        if self._world.size > 1:
            dist.broadcast_object_list(box, src=0)
        result: Result = box[0]
        return result

    def _total(self, number: int) -> int:
        total = torch.tensor([number], device=self._engine.device)
        dist.all_reduce(total)
        return int(total)

    def _figures(
        self, found: Header, sent: _Sent, num_bytes: int, seconds: float, waited: float
    ) -> OuterStepMetrics:
        totals = reduce_site_metrics(sent.squares, num_bytes, self._engine.device)
        distance = found.get("distances", {}).get(str(self.sites.index))
        return OuterStepMetrics(
            self.number,
            0,
            tuple(found["sites"]),
            totals.sent_bytes,
            totals.most_bytes,
            seconds,
            waited,
            totals.change,
            distance,
        )
