"""The outer step of a site: exchange its engine's masters with other sites and update them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain

import torch

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError, TrainingError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.attempt import AnyExchange, Attempt, transfer
from bigtrain.sites.codecs import CODECS
from bigtrain.sites.contribution import refuse_own_change
from bigtrain.sites.counterparts import Ranks
from bigtrain.sites.exchange import Exchange, ShardExchange
from bigtrain.sites.meeting.roll_call import START
from bigtrain.sites.meeting.roster import Presence, Roster, agreed_roster
from bigtrain.sites.meeting.site_rendezvous import SiteRendezvous
from bigtrain.sites.meeting.start import LostSiteError, Places, refuse_differences
from bigtrain.sites.metrics import (
    ALONE,
    LEFT_OUT,
    RETURNED,
    OuterEvent,
    OuterStepMetrics,
    reduce_site_metrics,
    square,
)
from bigtrain.sites.outer_optimizer import outer_update
from bigtrain.sites.outer_state import OuterState, Window, held_twice
from bigtrain.sites.rectangle_exchange import RectangleExchange, own_boxes


class OuterStep:
    """Moves the global weights, and the masters of one rank to them. Methods are collective over
    this site; the sites that can reach each other make an outer step together, a single one as
    well.

    What a site has changed is lost only where others have made an outer step without it: then it
    takes theirs. With an overlap, what is sent after a step goes in a thread, beside the next
    steps, and takes effect `sites.overlap_steps` later. notes, events, step: as of `ServerStep`.
    seen: tokens that the global weights have seen, on all sites.
    """

    def __init__(self, engine: TrainEngine, rendezvous: SiteRendezvous) -> None:
        self._engine = engine
        self._rendezvous = rendezvous
        self._under_way: Attempt | None = None
        self.number = self.seen = 0
        self._sent_steps = [0] * self.sites.fragments  # after which each fragment was sent last
        self._is_away = self._was_alone = False
        self.notes: list[str] = []
        self.events: list[OuterEvent] = []
        self.step: int | None = None
        self._plain = self._plain_parameters()
        self.state = OuterState(engine, self.sites, self._plain)
        self._exchange = self._open_exchange()

    @property
    def sites(self) -> SitesSection:
        return self._rendezvous.sites

    @property
    def under_way(self) -> tuple[int, int] | None:
        """The fragment that was sent and has not taken effect, and the step it was sent after."""
        sent = self._under_way
        return None if sent is None or sent.fragment is None else (sent.fragment, sent.step)

    @property
    def places(self) -> Places:
        """The doors of the sites, as the main rank knows them."""
        call = self._rendezvous.roll_call
        return {} if call is None else call.places

    def begin(
        self,
        number: int,
        step: int,
        *,
        is_new: bool,
        under_way: tuple[int, int] | None = None,
        seen: int = 0,
    ) -> None:
        """Begin after `number` outer steps and `step` steps, with the engine filled. The weights of
        a new run become the global ones; a resumed run has those of its checkpoint, and what was
        `under_way`. Where other sites are further, this one takes their global weights.

        Raises LaunchError if sites of a new run have other weights.
        """
        self.number, self.seen = number, seen
        if is_new:
            for window in self._windows():
                window.weights.copy_(window.gathered())
        between = self.sites.steps_between
        for sent_step in range(between, step + 1, between)[-self.sites.fragments :]:
            for fragment in self.sites.sent_after(sent_step, step + 1):
                self._sent_steps[fragment] = sent_step
        if under_way is not None:  # saved once the global weights were updated, see `settle`
            fragment, sent_step = under_way
            self._under_way = Attempt(fragment, sent_step, is_settled=True, is_done=True)
        attempt = Attempt(None, step)
        self._come_back(attempt, is_patient=True)
        if attempt.roster is not None:
            refuse_differences(
                {site: {"the global weights": d} for site, d in attempt.roster.digests.items()}
            )
        if attempt.has_taken:
            self._under_way = None
            self._engine.refresh_parameters()

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `after_step` has something to do."""
        sites, sent = self.sites, self._under_way
        merges = sent is not None and step == sites.merged_after(sent.step)
        return merges or self._looks_for_others or bool(sites.sent_after(step, last_step))

    def after_step(self, step: int, last_step: int) -> list[OuterStepMetrics]:
        """What is due after `step` of `last_step` steps; returns what outer steps ended.

        Raises LaunchError on all ranks if one of this site cannot, TrainingError if the change of
        this site is not finite, or too large.
        """
        found: list[OuterStepMetrics] = []
        is_last, self.step, taken = step == last_step, None, False
        mixing = 0.0 if is_last else self.sites.mixing
        is_moved = False
        sent = self._under_way
        if sent is not None and (is_last or step == self.sites.merged_after(sent.step)):
            found += self.settle()
            if self._under_way is not None:
                is_moved = self._merge(sent, mixing)
            taken, self._under_way = sent.has_taken, None
        if self._under_way is None and self._is_called(is_last=is_last):
            attempt = Attempt(None, step)
            found += self._come_back(attempt)
            taken |= attempt.has_taken
        for fragment in self.sites.sent_after(step, last_step):
            if taken or self._is_away:
                break
            attempt = Attempt(fragment, step)
            self._refuse_own_change(fragment, step)
            if self.sites.overlap_steps and not is_last:
                self._begin_thread(attempt)
                continue
            found += self._make(attempt, mixing)
            is_moved = True
            taken = self.step is not None
        if is_moved or taken:
            self._engine.refresh_parameters()
        return found

    def settle(self) -> list[OuterStepMetrics]:
        """Wait for what is under way, and update the global weights by it. Comes before a save: a
        checkpoint holds nothing that is under way. Raises as `after_step`."""
        sent, self.step = self._under_way, None
        if sent is None or sent.is_settled:
            return []
        begun = time.perf_counter()
        assert sent.thread is not None
        sent.thread.join()
        self._rendezvous.agreed(lambda: _raise(sent.error))
        sent.waited = time.perf_counter() - begun
        squares = self._apply(sent)
        if sent.has_taken:
            self._merge(sent, 0.0)
            self._under_way = None
            self._engine.refresh_parameters()
        return self._figures(sent, squares, sent.seconds)

    def stop(self) -> None:
        """Before the run ends early: the others do not wait for this site."""
        self._rendezvous.leave()

    def close(self) -> None:
        """After the last step: leave, who leads when the others do."""
        self._rendezvous.close()

    def _plain_parameters(self) -> list[str]:
        """What a site holds several times travels in float32, on all sites alike."""
        if not CODECS[self.sites.codec].keeps_error:
            return []
        own = sorted(held_twice(self._engine))
        everyones = self._rendezvous.tell("what is held several times", own)
        found = {name for of_site in everyones for names in of_site for name in names}
        there = self._rendezvous.plain
        if there is not None:
            if not found <= set(there):
                raise LaunchError(
                    "sites.codec: this site holds parameters several times that the others, which "
                    f"train already, send in blocks ({min(found - set(there))}) -> the degrees "
                    "that it had before, or start all sites again"
                )
            found = set(there)
        self._rendezvous.offer(sorted(found))
        return sorted(found)

    def _open_exchange(self) -> AnyExchange:
        """By shards where all sites have the same layout, else by rectangles. Collective over the
        members; raises LostSiteError on all ranks."""
        meeting = self._rendezvous
        weights = [self.sites.weights()[site] for site in meeting.members]

        def exchange(ranks: Ranks) -> Exchange:
            return Exchange(meeting.open_group(ranks), weights)

        layouts = meeting.tell("layouts", [self.state.layout(), self._plain])
        if any(plain != self._plain for layout in layouts for _, plain in layout):
            raise LaunchError(
                "sites.codec: sites that began apart hold other parameters several times, so that "
                "they encode them otherwise -> start all sites again"
            )
        if all(layout == layouts[0] for layout in layouts):
            return ShardExchange(self.state, meeting.agreed(lambda: exchange(meeting.own_ranks)))
        told = meeting.tell("rectangles", own_boxes(self.state))

        def open_all() -> RectangleExchange:
            try:
                found = RectangleExchange(self.state, told, meeting.position, meeting.rank)
            except ValueError as error:
                raise LaunchError(
                    f"another site has no rectangles of this model: {error}"
                ) from error
            found.open({ranks: exchange(ranks) for ranks in found.ranks})
            return found

        sizes = ", ".join(str(len(layout)) for layout in layouts)
        self.notes.append(f"sites differ in layout ({sizes} ranks): they exchange by rectangles")
        return meeting.agreed(open_all)

    def _refuse_own_change(self, fragment: int, step: int) -> None:
        """Leave, and raise TrainingError on every rank, if no outer step may use the change."""
        if self.sites.count == 1:
            return
        windows = self.state.windows(fragment)
        try:
            refuse_own_change(windows, (), self.sites.index, step, self._engine.device)
        except TrainingError as error:
            self._rendezvous.leave(str(error.__cause__))
            raise

    def _make(self, attempt: Attempt, mixing: float) -> list[OuterStepMetrics]:
        """An outer step, tried again without those that are lost meanwhile."""
        begun = time.perf_counter()
        for _ in range(2 * self.sites.count + 2):
            self._meet(attempt)
            squares = self._apply(attempt)
            if attempt.roster is None or attempt.is_done:
                self._merge(attempt, mixing)
                return self._figures(attempt, squares, time.perf_counter() - begun)
            attempt = Attempt(attempt.fragment, attempt.step)
        raise LaunchError(f"no outer step after {self.number} came about: {self.notes[-1]}")

    def _begin_thread(self, attempt: Attempt) -> None:
        """Meet beside the next steps, with the masters as they are now."""
        assert attempt.fragment is not None
        attempt.locals = [w.gathered() for w in self.state.windows(attempt.fragment)]

        def send() -> None:
            begun = time.perf_counter()
            try:
                self._meet(attempt)
            except Exception as error:  # which `settle` raises on all ranks
                attempt.error = error
            attempt.seconds = time.perf_counter() - begun

        # Not of an executor: those are waited for at exit, and a lost site takes long to be missed.
        attempt.thread = threading.Thread(target=send, name="outer step", daemon=True)
        self._under_way = attempt
        attempt.thread.start()

    def _come_back(self, attempt: Attempt, *, is_patient: bool = False) -> list[OuterStepMetrics]:
        """Take the global weights of the sites that are further, if there are any."""
        begun = time.perf_counter()
        self._meet(attempt, is_patient=is_patient)
        squares = self._apply(attempt)
        self._merge(attempt, 0.0)
        return self._figures(attempt, squares, time.perf_counter() - begun)

    def _is_called(self, *, is_last: bool) -> bool:
        """Whether a site that is away is to come back now, and after the last step in any case."""
        call = self._rendezvous.roll_call
        if not self._looks_for_others:
            return False

        def look() -> tuple[bool, bool]:
            assert call is not None
            is_called = call.is_called()  # which may find that nobody is further
            return is_called, call.is_away

        is_called, self._is_away = self._rendezvous.on_main(look)
        return self._is_away and (is_called or is_last)

    @property
    def _looks_for_others(self) -> bool:
        is_alone = len(self._rendezvous.members) == 1 < self.sites.count
        return self._is_away or is_alone

    def _meet(self, attempt: Attempt, *, is_patient: bool = False) -> None:
        """Agree who takes part in an attempt, exchange, and agree whether it counts. Changes
        nothing of this site but the attempt; collective in `SiteRendezvous.ranks` alone, since it
        may go in a thread."""
        meeting = self._rendezvous
        begun = time.perf_counter()
        roster = attempt.roster = self._roster(attempt, is_patient=is_patient)
        attempt.waited = time.perf_counter() - begun
        if roster is None:
            return
        try:
            if meeting.regroup(roster):
                self._exchange = self._open_exchange()
            meeting.agreed(
                lambda: transfer(attempt, roster, self.state, self._exchange, self.sites)
            )
        except LostSiteError as error:
            attempt.failure, attempt.unusable = str(error), error.unusable
            # Its groups are closed, so that no other rank waits for this one.
            self._exchange = ShardExchange(self.state, Exchange(None, [1]))
        call = meeting.roll_call

        def decide() -> bool:
            is_done = not attempt.failure
            if call is None:
                return is_done
            return call.decide(roster, is_done=is_done, unusable=attempt.unusable)

        attempt.is_done = meeting.on_main(decide)

    def _roster(self, attempt: Attempt, *, is_patient: bool) -> Roster | None:
        meeting, sites, fragment = self._rendezvous, self.sites, attempt.fragment
        tokens = 0
        if fragment is not None:
            steps = max(1, attempt.step - self._sent_steps[fragment])
            tokens = steps * self._engine.plan.site_tokens_per_step
        is_one = sites.count == 1
        checksum = 0 if is_one else meeting.total(self.state.checksum()) % (1 << 64)
        presence = Presence(
            sites.index,
            self.number,
            attempt.step,
            fragment,
            tokens,
            f"{checksum:016x}",
            self.seen,
        )
        if is_one:
            return agreed_roster({0: presence}, 0, ("", 0), START)

        def gather() -> Roster | None:
            assert meeting.roll_call is not None
            return meeting.roll_call.gather(presence, is_patient=is_patient)

        return meeting.on_main(gather)

    def _apply(self, attempt: Attempt) -> torch.Tensor:
        """Move the global weights by an attempt that counts; sums for the figures. Collective over
        this site."""
        squares = torch.zeros(3, dtype=torch.float64)
        roster, attempt.is_settled = attempt.roster, True
        self._is_away = roster is None
        self._say(attempt)
        if roster is None or not attempt.is_done:
            return squares
        self.number, self.seen = roster.number, roster.seen
        if attempt.taken:
            taken = [pair for pairs in attempt.taken for pair in pairs]
            for window, (weights, momentum) in zip(self._windows(), taken, strict=True):
                window.weights.copy_(self._joined(weights))
                if window.momentum is not None and momentum is not None:
                    window.momentum.copy_(self._joined(momentum))
                if window.error is not None:
                    window.error.zero_()
            self._sent_steps = [roster.step] * self.sites.fragments
            self.step = roster.step if roster.step > attempt.step else None
        elif roster.fragment is not None:
            self._sent_steps[roster.fragment] = attempt.step
        if roster.fragment is not None:
            for index, window in enumerate(self.state.windows(roster.fragment)):
                local = attempt.locals[index] if attempt.locals else None
                if attempt.taken:
                    local = window.weights.clone()
                local = window.gathered() if local is None else local
                own = self.state.own(len(local))
                mean = self._joined_part(attempt.means[index], len(local))
                squares += self._update(window, local, mean)
                error = attempt.errors[index]
                if window.error is not None and error is not None:
                    window.error.copy_(self._joined_part(error[own], len(local)))
        return squares

    def _joined(self, full: torch.Tensor) -> torch.Tensor:
        """A tensor of a window, of which this rank has its own share."""
        return self._joined_part(full[self.state.own(len(full))], len(full))

    def _joined_part(self, own: torch.Tensor, length: int) -> torch.Tensor:
        replicas = self.state.replicas
        return own if replicas is None else replicas.joined(own, length)

    def _update(self, window: Window, local: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Update the global weights of a window; returns sums for the figures."""
        change, distance = square(local, window.weights), square(local, mean)
        outer_update(window.weights, window.momentum, mean, self.sites)
        return torch.tensor([change, distance, len(local)], dtype=torch.float64)

    def _merge(self, attempt: Attempt, mixing: float) -> bool:
        """Move the masters to the global weights by an attempt; whether they have moved."""
        if attempt.has_taken:  # what this site has trained is left out
            windows, mixing = self._windows(), 0.0
        elif attempt.is_done and attempt.fragment is not None:
            windows = self.state.windows(attempt.fragment)
        else:
            return False
        for window in windows:
            window.merge(mixing)
        return True

    def _windows(self) -> Iterator[Window]:
        """Of the whole model, fragment after fragment."""
        return chain.from_iterable(map(self.state.windows, range(self.sites.fragments)))

    def _say(self, attempt: Attempt) -> None:
        """What has happened at an attempt, to this site and to others."""
        roster, own = attempt.roster, f"site {self.sites.index}"
        if roster is None:
            reason = "the others made an outer step without it"
            self.events.append(OuterEvent(ALONE, own, reason, self.number))
            self.notes.append(
                f"step {attempt.step}: the others are further than outer step {self.number}; this "
                "site goes on alone until they call it"
            )
            return
        if not attempt.is_done:
            self.notes.append(
                f"step {attempt.step}: no outer step after {self.number}: "
                f"{attempt.failure or 'another site was lost'}"
            )
            return
        is_alone = len(roster.members) == 1 < self.sites.count
        if is_alone and not self._was_alone:
            reason = "no other site can be reached, or came in time"
            self.events.append(OuterEvent(ALONE, own, reason, roster.number))
            self.notes.append(f"step {attempt.step}: {reason}; this site goes on alone")
        self._was_alone = is_alone
        words = {LEFT_OUT: "is left out", RETURNED: "is back"}
        for event in roster.events:
            self.events.append(event)
            text = f"{event.who} {words[event.event]}: {event.reason}"
            self.notes.append(f"step {attempt.step}, outer step {roster.number}: {text}")
        if attempt.taken and roster.step > attempt.step:
            self.notes.append(
                f"step {attempt.step}: the other sites are at step {roster.step}, where this one "
                f"goes on; its share of the samples of {roster.step - attempt.step} steps is left "
                "out"
            )

    def _figures(
        self, attempt: Attempt, squares: torch.Tensor, seconds: float
    ) -> list[OuterStepMetrics]:
        """Of an outer step that was made. Collective over this site."""
        roster = attempt.roster
        if roster is None or roster.fragment is None or not attempt.is_done:
            return []
        totals = reduce_site_metrics(squares, attempt.num_bytes, self._engine.device)
        figures = OuterStepMetrics(
            roster.number,
            roster.fragment,
            roster.sites,
            totals.sent_bytes,
            totals.most_bytes // max(1, len(roster.members) - 1),
            seconds,
            attempt.waited,
            totals.change,
            totals.distance,
        )
        return [figures]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
