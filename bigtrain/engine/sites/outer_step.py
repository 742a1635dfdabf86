"""The outer step of a site: exchange its engine's masters with other sites and update them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from bigtrain.engine.deepspeed_patches.optimizers import refresh_parameters
from bigtrain.engine.sites.codecs import CODECS
from bigtrain.engine.sites.counterparts import Ranks
from bigtrain.engine.sites.exchange import Exchange
from bigtrain.engine.sites.figures import OuterEvent, OuterFigures, site_totals, square
from bigtrain.engine.sites.outer_state import OuterState, Window, held_twice
from bigtrain.engine.sites.outer_update import outer_update
from bigtrain.engine.sites.rectangle_exchange import RectangleExchange, own_boxes
from bigtrain.engine.sites.site_rendezvous import Facts, SiteRendezvous
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError
from bigtrain.settings.sections.sites import SitesSection


@dataclass
class _UnderWay:
    """A fragment that this site sends after `step` in outer step `number`.

    is_settled: whether the global weights are updated by it. num_bytes: that this rank sent.
    `locals`: the masters by window as they were; `means`: over the sites, of what this rank
    exchanges of them; both empty where one window goes after the other. Of what goes in a thread:
    `error`, which ended it; `seconds` that it took.
    """

    fragment: int
    number: int
    step: int
    is_settled: bool = False
    num_bytes: int = 0
    thread: threading.Thread | None = None
    locals: list[torch.Tensor] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)
    error: Exception | None = None
    seconds: float = 0.0


class OuterStep:
    """Moves the global weights, and the masters of one rank to them. Methods are collective over
    all sites.

    With an overlap, what is sent after a step goes in a thread, beside the next steps, and takes
    effect `sites.overlap_steps` later.
    """

    def __init__(self, engine: TrainEngine, rendezvous: SiteRendezvous) -> None:
        self._engine = engine
        self._rendezvous = rendezvous
        self._under_way: _UnderWay | None = None
        self.number = 0
        # As of `ServerStep`: sites that meet are at the same step, and end if one is lost.
        self.notes: list[str] = []
        self.events: list[OuterEvent] = []
        self.step: int | None = None
        self.state = OuterState(engine, self.sites, self._plain_parameters())
        self._exchange: Exchange | RectangleExchange = self._open_exchange()

    def _plain_parameters(self) -> set[str]:
        """What a site holds several times travels in float32, on all sites alike."""
        if not CODECS[self.sites.codec].keeps_error:
            return set()
        own = sorted(held_twice(self._engine))
        everyones = self._rendezvous.tell("what is held several times", own)
        return {name for of_site in everyones for names in of_site for name in names}

    def _open_exchange(self) -> Exchange | RectangleExchange:
        """By shards where all sites have the same layout, else by rectangles."""
        meeting, weights = self._rendezvous, self.sites.weights()

        def exchange(ranks: Ranks) -> Exchange:
            return Exchange(meeting.open_group(ranks), weights)

        layouts = meeting.tell("layouts", self.state.layout())
        if all(layout == layouts[0] for layout in layouts):
            return on_all_ranks(lambda: exchange(meeting.own_ranks))
        told = meeting.tell("rectangles", own_boxes(self.state))

        def open_all() -> RectangleExchange:
            try:
                found = RectangleExchange(self.state, told, self.sites.index, meeting.rank)
            except ValueError as error:
                raise LaunchError(
                    f"another site has no rectangles of this model: {error}"
                ) from error
            found.open({ranks: exchange(ranks) for ranks in found.ranks})
            return found

        sizes = ", ".join(str(len(layout)) for layout in layouts)
        self.notes.append(f"sites differ in layout ({sizes} ranks): they exchange by rectangles")
        return on_all_ranks(open_all)

    @property
    def sites(self) -> SitesSection:
        return self._rendezvous.sites

    @property
    def under_way(self) -> tuple[int, int] | None:
        """The fragment that was sent and has not taken effect, and the step it was sent after."""
        sent = self._under_way
        return None if sent is None else (sent.fragment, sent.step)

    def begin(
        self,
        number: int,
        step: int,
        *,
        is_new: bool,
        under_way: tuple[int, int] | None = None,
    ) -> None:
        """Begin after `number` outer steps and `step` steps, with the engine filled. The weights of
        a new run become the global ones; a resumed run has those of its checkpoint, and what was
        `under_way`.

        Raises LaunchError if other sites have other global weights or another number.
        """
        self.number = number
        if is_new:
            for fragment in range(self.sites.fragments):
                for window in self.state.windows(fragment):
                    window.weights.copy_(window.gathered())
        name = "the beginning"
        self._rendezvous.compare(name, self._facts({"the number of outer steps": number}))
        if under_way is not None:  # saved once the global weights were updated, see `settle`
            fragment, sent_step = under_way
            self._under_way = _UnderWay(fragment, number, sent_step, is_settled=True)

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `after_step` has something to do."""
        sites, sent = self.sites, self._under_way
        merges = sent is not None and step == sites.merged_after(sent.step)
        return merges or bool(sites.sent_after(step, last_step))

    def after_step(self, step: int, last_step: int) -> list[OuterFigures]:
        """What is due after `step` of `last_step` steps; returns what outer steps ended.

        Raises LaunchError on all ranks of a site if one of them cannot: a site does not join, is
        lost, or has other global weights.
        """
        found: list[OuterFigures] = []
        is_last, is_moved = step == last_step, False
        under_way = self._under_way
        if under_way is not None and (is_last or step == self.sites.merged_after(under_way.step)):
            found += self.settle()
            for window in self.state.windows(under_way.fragment):
                window.merge(0.0 if is_last else self.sites.mixing)
            self._under_way, is_moved = None, True
        for fragment in self.sites.sent_after(step, last_step):
            self.number += 1
            sent = _UnderWay(fragment, self.number, step)
            if self.sites.overlap_steps and not is_last:
                self._send_beside(sent)
                continue
            found.append(self._send_now(sent, 0.0 if is_last else self.sites.mixing))
            is_moved = True
        if is_moved:
            refresh_parameters(self._engine.engine)
        return found

    def settle(self) -> list[OuterFigures]:
        """Wait for what is under way, and update the global weights by it. Comes before a save: a
        checkpoint holds nothing that is under way. Collective over this site; raises as
        `after_step`."""
        sent = self._under_way
        if sent is None or sent.is_settled:
            return []
        begun = time.perf_counter()
        assert sent.thread is not None
        sent.thread.join()
        self._agree(sent.error)
        squares = self._update_all(sent)
        self._under_way = _UnderWay(sent.fragment, sent.number, sent.step, is_settled=True)
        return [self._figures(sent, squares, time.perf_counter() - begun)]

    def close(self) -> None:
        """After the last step: leave when all ranks of all sites do."""
        self._rendezvous.close()

    def _send_now(self, sent: _UnderWay, mixing: float) -> OuterFigures:
        """An outer step of one fragment, a window at a time."""
        begun = time.perf_counter()
        self._rendezvous.compare(*self._facts_of(sent))
        waited = time.perf_counter() - begun
        squares = torch.zeros(3, dtype=torch.float64)
        if isinstance(self._exchange, RectangleExchange):
            windows = list(self.state.windows(sent.fragment))
            sent.locals = [window.gathered() for window in windows]
            sent.means = on_all_ranks(lambda: self._means(sent, windows))
            squares += self._update_all(sent)
            for window in windows:
                window.merge(mixing)
            return self._figures(sent, squares, waited, time.perf_counter() - begun)
        replicas = self.state.replicas
        group = None if replicas is None else replicas.group

        def update() -> None:
            for window in self.state.windows(sent.fragment):
                local = window.gathered()
                if replicas is None:
                    mean = self._mean(sent, window, local)
                else:  # they need each other's shares of every window
                    part = functools.partial(self._mean, sent, window, local)
                    mean = self._joined(window, on_all_ranks(part, group))
                squares.add_(self._update(window, local, mean))
                window.merge(mixing)

        on_all_ranks(update)
        return self._figures(sent, squares, waited, time.perf_counter() - begun)

    def _send_beside(self, sent: _UnderWay) -> None:
        """Begin an outer step of one fragment in a thread, with the masters as they are now."""
        windows = list(self.state.windows(sent.fragment))
        sent.locals = [window.gathered() for window in windows]

        def send() -> None:
            begun = time.perf_counter()
            try:
                self._rendezvous.refuse_others(*self._facts_of(sent))
                sent.means = self._means(sent, windows)
            except Exception as error:  # which `settle` raises on all ranks
                sent.error = error
            sent.seconds = time.perf_counter() - begun

        # Not of an executor: those are waited for at exit, and a lost site takes long to be missed.
        sent.thread = threading.Thread(target=send, name="outer step", daemon=True)
        self._under_way = sent
        sent.thread.start()

    def _facts_of(self, sent: _UnderWay) -> tuple[str, dict[Ranks, Facts]]:
        name = f"outer step {sent.number}"
        return name, self._facts({name: sent.fragment}, sent.fragment)

    def _facts(self, facts: Facts, fragment: int | None = None) -> dict[Ranks, Facts]:
        """What each group of ranks that exchange must have alike: `facts`, and the global weights
        of a fragment or of all."""
        if isinstance(self._exchange, RectangleExchange):
            digests = dict(self._exchange.digests(fragment))
        else:
            digests = {self._rendezvous.own_ranks: self.state.digest(fragment)}
        return {ranks: {**facts, "the global weights": one} for ranks, one in digests.items()}

    def _agree(self, error: Exception | None) -> None:
        """Raise `error` on all ranks of this site."""

        def say() -> None:
            if error is not None:
                raise error

        self._rendezvous.agree(say)

    def _means(self, sent: _UnderWay, windows: Sequence[Window]) -> list[torch.Tensor]:
        """By window of `sent` the mean over sites of what this rank exchanges of it. Not collective
        in a site."""
        exchange = self._exchange
        if isinstance(exchange, Exchange):
            pairs = zip(windows, sent.locals, strict=True)
            return [self._mean(sent, window, local) for window, local in pairs]
        with self._counted(sent):
            return exchange.means(sent.fragment, windows, sent.locals)

    def _mean(self, sent: _UnderWay, window: Window, local: torch.Tensor) -> torch.Tensor:
        """As `_means`, of one window, where sites have the same layout."""
        assert isinstance(self._exchange, Exchange)
        own = self.state.own(len(local))
        error = None if window.error is None else window.error[own]
        with self._counted(sent):
            return self._exchange.mean(window.codec, local[own], window.weights[own], error)

    @contextmanager
    def _counted(self, sent: _UnderWay) -> Iterator[None]:
        """Count the bytes that are sent inside. Raises LaunchError where a site is lost."""
        before = self._exchange.num_bytes
        try:
            yield
        except RuntimeError as failure:
            raise LaunchError(
                f"outer step {sent.number}: another site was lost, or took longer than "
                f"sites.timeout_seconds = {self.sites.timeout_seconds:g} for a transfer: "
                f"{failure} -> see what the other sites say; started again, all resume from "
                "their newest checkpoints"
            ) from failure
        sent.num_bytes += self._exchange.num_bytes - before

    def _joined(self, window: Window, mean: torch.Tensor) -> torch.Tensor:
        """The mean of a whole window, of which this rank exchanged its share."""
        replicas, length = self.state.replicas, len(window.weights)
        if replicas is None:
            return mean
        if window.error is not None:  # all replicas keep it, as all else
            own = window.error[replicas.own(length)]
            window.error.copy_(replicas.joined(own, length))
        return replicas.joined(mean, length)

    def _update_all(self, sent: _UnderWay) -> torch.Tensor:
        """`_update` of all windows of `sent`, of which this rank has the means of its shares.
        Collective over this site."""
        squares = torch.zeros(3, dtype=torch.float64)
        windows = self.state.windows(sent.fragment)
        for window, local, mean in zip(windows, sent.locals, sent.means, strict=True):
            squares += self._update(window, local, self._joined(window, mean))
        return squares

    def _update(self, window: Window, local: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Update the global weights of a window; returns sums for the figures."""
        change, distance = square(local, window.weights), square(local, mean)
        outer_update(window.weights, window.momentum, mean, self.sites)
        return torch.tensor([change, distance, len(local)], dtype=torch.float64)

    def _figures(
        self, sent: _UnderWay, squares: torch.Tensor, waited: float, seconds: float | None = None
    ) -> OuterFigures:
        """Collective over this site. seconds: None for what went beside the steps."""
        totals = site_totals(squares, sent.num_bytes, self._engine.device)
        return OuterFigures(
            sent.number,
            sent.fragment,
            tuple(range(self.sites.count)),
            totals.sent_bytes,
            totals.most_bytes // max(1, self.sites.count - 1),
            sent.seconds if seconds is None else seconds,
            waited,
            totals.change,
            totals.distance,
        )
