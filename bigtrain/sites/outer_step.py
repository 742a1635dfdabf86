"""The outer step of a site: the exchange with other sites, and the global weights afterwards."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError, TrainingError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.attempt import Attempt
from bigtrain.sites.contribution import refuse_own_change
from bigtrain.sites.direct import DirectSteps
from bigtrain.sites.membership import Membership
from bigtrain.sites.metrics import (
    ALONE,
    LEFT_OUT,
    RETURNED,
    OuterEvent,
    OuterStepMetrics,
    square,
)
from bigtrain.sites.outer_optimizer import outer_update
from bigtrain.sites.outer_state import OuterState
from bigtrain.sites.protocol import StepRecord
from bigtrain.sites.site_ranks import SiteRanks
from bigtrain.sites.through_server import ServerSteps, full_shapes
from bigtrain.system.world import World

_MOST_SHOWN = 10
_WORDS = {LEFT_OUT: "is left out", RETURNED: "is back"}


class OuterStep:
    """Outer steps of a rank: update of the global weights and the rank's masters. Methods are
    collective over this site.

    A site that cannot reach the server trains alone, and enters the next outer step again; its
    change is lost only if other sites made outer steps meanwhile: then it takes the global weights.
    With an overlap, a fragment is exchanged in a thread, next to the following steps, and takes
    effect `sites.overlap_steps` later.

    last_step: of the run. facts: settings and data that all sites must have alike; allowed: facts
    that this site may change (``checkpoint.allow_changes``). run: id of the run directory, on the
    main rank. on_wait: called on the main rank while this site waits for sites that train, which
    may take long.

    record: of the last outer step, with the sites of the last mean in this launch. notes: lines to
    show; events: of all sites and the server, for the metrics. continue_at: optimizer step at which
    the run continues, if the last call took the weights of sites that are ahead; else None.
    detach_reason: why this site takes part in no outer step; empty while it takes part.
    """

    def __init__(
        self,
        engine: TrainEngine,
        sites: SitesSection,
        world: World,
        facts: Mapping[str, Any],
        *,
        last_step: int,
        run: str,
        allowed: Sequence[str] = (),
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self.sites, self._last_step = sites, last_step
        self._engine = engine
        self._ranks = SiteRanks(world)
        self._is_main = world.is_main
        self._pending: Attempt | None = None
        self.record, self._received_step = StepRecord(), 0
        self._sent_steps = [0] * sites.fragments  # by fragment, the optimizer step of the last send
        self._was_alone = self._others_train = False
        self.detach_reason = ""
        self.notes: list[str] = []
        self.events: list[OuterEvent] = []
        self.continue_at: int | None = None
        self._membership: Membership | None = None
        if sites.server is not None:
            run = self._ranks.on_main(lambda: run)
            self._membership = self._ranks.on_all(lambda: Membership(sites, run))
        self._join_fields = {
            "facts": dict(facts),
            "allowed": list(allowed),
            "parameters": sorted(full_shapes(engine, self._ranks).items()),
        }
        self._exchange: ServerSteps | DirectSteps
        membership = self._membership
        if membership is not None and sites.server_holds_weights:
            self._exchange = ServerSteps(engine, sites, self._ranks, membership)
        else:
            self._exchange = DirectSteps(engine, sites, self._ranks, membership, on_wait)
        self.state: OuterState = self._exchange.state

    @property
    def pending_fragment(self) -> tuple[int, int] | None:
        """The fragment that was sent and has not taken effect, and the optimizer step after which
        it was sent; None if there is none."""
        sent = self._pending
        return None if sent is None or sent.fragment is None else (sent.fragment, sent.step)

    def begin(
        self,
        number: int,
        step: int,
        *,
        is_new: bool,
        pending_fragment: tuple[int, int] | None = None,
        tokens_seen: int = 0,
    ) -> None:
        """Begin after `number` outer steps and `step` steps, with the engine filled. The weights of
        a new run become the global weights; a resumed run has the global weights and the
        `pending_fragment` of its checkpoint. If other sites are ahead, this site takes their global
        weights.

        Raises LaunchError on every rank if the server is unreachable or serves a different run, or
        if sites of a new run do not join or have different weights.
        """
        self.record = StepRecord(number=number, tokens_seen=tokens_seen)
        if is_new:
            for bucket in self.state.all_buckets():
                bucket.weights.copy_(bucket.copy_masters())
        # The last sends of the fragments up to `step`: `steps_between` apart, in turn.
        send_steps = range(self.sites.steps_between, step + 1, self.sites.steps_between)
        for sent_step in send_steps[-self.sites.fragments :]:
            for fragment in self.sites.sent_after(sent_step, step + 1):
                self._sent_steps[fragment] = sent_step
        if pending_fragment is not None:
            # The checkpoint was saved after `settle`, so the global weights are updated already:
            # only the merge of an attempt that counts (it has a record) is left.
            fragment, sent_step = pending_fragment
            self._pending = Attempt(fragment, sent_step, record=StepRecord())
        self._exchange.begin({**self._join_fields, "number": number, "is_new": is_new})
        attempt = self._complete(None, step)
        if attempt.detach_reason:
            raise LaunchError(attempt.detach_reason)
        if self._merge(attempt, 0.0):  # with the weights of sites that are ahead
            self._pending = None
            self._engine.refresh_parameters()

    def is_due(self, step: int) -> bool:
        """Return whether `after_step` merges or sends a fragment after `step`."""
        sent = self._pending
        merges = sent is not None and step == self.sites.merged_after(sent.step)
        return merges or bool(self.sites.sent_after(step, self._last_step))

    def after_step(self, step: int) -> list[OuterStepMetrics]:
        """Do what is due after `step`; return the metrics of the outer steps that ended.

        Raises LaunchError on all ranks if a rank of this site fails, TrainingError if the change of
        this site is not finite, or too large, or the server refuses this site.
        """
        metrics: list[OuterStepMetrics] = []
        self.continue_at = None
        is_last = step == self._last_step
        mixing = 0.0 if is_last else self.sites.mixing
        has_moved = stops_sending = False

        # A fragment that was sent earlier takes effect.
        sent = self._pending
        if sent is not None and (is_last or step == self.sites.merged_after(sent.step)):
            metrics += self.settle()
            if self._pending is not None:  # else `settle` has merged it
                has_moved = self._merge(sent, mixing)
            stops_sending, self._pending = sent.has_received, None

        # Send the fragments that are due: with an overlap in a thread, except after the last step.
        # Once weights of other sites were taken there is no change relative to them to send.
        for fragment in self.sites.sent_after(step, self._last_step):
            if stops_sending or self._received_step == step:
                break
            if self._membership is not None:
                # Leave if no outer step may use the change; the check raises on every rank.
                buckets = self.state.buckets(fragment)
                try:
                    refuse_own_change(buckets, self.sites.index, step, self._ranks)
                except TrainingError as error:
                    self.close(str(error.__cause__))
                    raise
            if self.sites.overlap_steps and not is_last:
                self._begin_thread(fragment, step)
                continue
            attempt = self._complete(fragment, step)
            has_moved |= self._merge(attempt, mixing)
            metrics += self._metrics(attempt)
            stops_sending = bool(attempt.detach_reason) or self.continue_at is not None

        # Other sites still train: take weights at every outer step until the run ends with one.
        while is_last and self.record.ended_step < step and self._others_train:
            has_moved |= self._merge(self._complete(None, step), 0.0)
        if has_moved:
            self._engine.refresh_parameters()
        return metrics

    def settle(self) -> list[OuterStepMetrics]:
        """Wait for the exchange in the thread, and update the global weights by its result. Called
        before a save: a checkpoint has no exchange in progress. Raises as `after_step`."""
        sent, self.continue_at = self._pending, None
        if sent is None or sent.future is None:
            return []
        started_at = time.perf_counter()
        self._ranks.on_all(sent.future.result)
        sent.future = None
        sent.waited = time.perf_counter() - started_at
        self._apply(sent)
        if sent.has_received:
            self._merge(sent, 0.0)
            self._pending = None
            self._engine.refresh_parameters()
        return self._metrics(sent)

    def close(self, reason: str = "") -> None:
        """Leave the run, so that no site waits for this site: after the last step, or before an
        early end, with a `reason` for the other sites."""
        if self._membership is not None and self._is_main:
            self.notes += filter(None, [self._membership.leave(reason)])

    # Attempts

    def _new_attempt(self, fragment: int | None, step: int) -> Attempt:
        """Return an attempt with its inputs, except `local`."""
        tokens = 0
        if fragment is not None:
            steps = max(1, step - self._sent_steps[fragment])
            tokens = steps * self._engine.plan.site_tokens_per_step
        is_last = step == self._last_step and fragment == self.sites.fragments - 1
        number, tokens_seen = self.record.number, self.record.tokens_seen
        return Attempt(fragment, step, self._last_step, is_last, number, tokens_seen, tokens)

    def _complete(self, fragment: int | None, step: int) -> Attempt:
        """Make an outer step; repeat it, without sites that were lost, until an attempt counts or
        this site is detached. Updates the global weights, not the masters."""
        started_at = time.perf_counter()
        # Enough for the server to exclude all other sites, each after two failures.
        for _ in range(2 * self.sites.count + 2):
            attempt = self._new_attempt(fragment, step)
            self._exchange.make(attempt)
            self._apply(attempt)
            if attempt.record is not None or attempt.detach_reason:
                attempt.seconds = time.perf_counter() - started_at
                return attempt
        raise LaunchError(f"no outer step after {self.record.number} came about: {self.notes[-1]}")

    def _begin_thread(self, fragment: int, step: int) -> None:
        """Make an attempt in parallel to the next steps, with a copy of the current masters."""
        attempt = self._new_attempt(fragment, step)
        attempt.local = [bucket.copy_masters() for bucket in self.state.buckets(fragment)]
        future = attempt.future = Future()

        def make() -> None:
            started_at = time.perf_counter()
            try:
                self._exchange.make(attempt)
                attempt.seconds = time.perf_counter() - started_at
                future.set_result(None)
            except Exception as error:  # raised on all ranks by `settle`
                future.set_exception(error)

        # A daemon thread: the exit would wait for one of an executor, which a lost site may delay.
        self._pending = attempt
        threading.Thread(target=make, name="outer step", daemon=True).start()

    # Results

    def _apply(self, attempt: Attempt) -> None:
        """Update the global weights by an attempt that counts. Collective over this site."""
        self._report(attempt)
        record = attempt.record
        if record is None:
            return
        # Without a mean in this outer step, the sites of the last mean stay.
        self.record = record.model_copy(update={"sites": record.sites or self.record.sites})
        if attempt.received is not None:
            for bucket, state in zip(self.state.all_buckets(), attempt.received, strict=True):
                bucket.weights.copy_(self._join_shares(state.weights))
                if bucket.momentum is not None and state.momentum is not None:
                    bucket.momentum.copy_(self._join_shares(state.momentum))
                if bucket.error is not None:
                    bucket.error.zero_()
            self.continue_at = record.step if record.step > attempt.step else None
            self._received_step = max(attempt.step, record.step)
            self._sent_steps = [self._received_step] * self.sites.fragments
        elif self.sites.server_holds_weights:
            self._sent_steps = [record.step]
        elif record.fragment is not None:
            self._sent_steps[record.fragment] = attempt.step
        if record.fragment is not None:
            self._update_fragment(attempt, record.fragment)

    def _update_fragment(self, attempt: Attempt, fragment: int) -> None:
        """Make the outer optimizer's step with the means, if there are any, and keep the new
        rounding errors."""
        for index, bucket in enumerate(self.state.buckets(fragment)):
            if attempt.means:
                if attempt.received is not None:  # this site's own change is discarded
                    local = bucket.weights.clone()
                else:
                    local = attempt.local[index] if attempt.local else bucket.copy_masters()
                mean = self.state.gather_shares(attempt.means[index], len(local))
                attempt.squares.change += square(local, bucket.weights)
                attempt.squares.distance += square(local, mean)
                attempt.squares.num_elements += len(local)
                outer_update(bucket.weights, bucket.momentum, mean, self.sites)
            error = attempt.errors[index] if attempt.errors else None
            if bucket.error is not None and error is not None:
                bucket.error.copy_(self._join_shares(error))

    def _join_shares(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the tensor [N] of a bucket, from every rank's share of a `partial` [N]."""
        own_share = partial[self.state.own_slice(len(partial))]
        return self.state.gather_shares(own_share, len(partial))

    def _merge(self, attempt: Attempt, mixing: float) -> bool:
        """Move the masters to the global weights after an attempt; return whether they moved."""
        if attempt.has_received:  # this site's change since the last outer step is discarded
            buckets, mixing = self.state.all_buckets(), 0.0
        elif attempt.record is not None and attempt.fragment is not None:
            buckets = self.state.buckets(attempt.fragment)
        else:
            return False
        for bucket in buckets:
            bucket.merge(mixing)
        return True

    # Reports

    def _report(self, attempt: Attempt) -> None:
        """Add lines and events on an attempt, of this site and of other sites."""
        step_text, site_name = f"step {attempt.step}", f"site {self.sites.index}"
        self.notes += [f"{step_text}: {note}" for note in attempt.notes]
        # No other site is reachable: this site continues without outer steps.
        if attempt.detach_reason:
            self.events.append(
                OuterEvent(ALONE, site_name, attempt.detach_reason, self.record.number)
            )
            self.notes.append(
                f"{step_text}: no outer step after {self.record.number}: {attempt.detach_reason}; "
                "this site trains on its own until its next outer step"
            )
            self.detach_reason, self._others_train = attempt.detach_reason, False
            return
        # Nothing was exchanged: the next outer step has these steps as well.
        record = attempt.record
        if record is None:
            self.notes.append(
                f"{step_text}: no outer step after {self.record.number}: {attempt.failure}"
            )
            return
        # An outer step was made: who took part, by events.
        events, number = attempt.events, record.number
        has_return_event = any((e.event, e.who) == (RETURNED, site_name) for e in events)
        if self.detach_reason and not has_return_event:
            events.append(OuterEvent(RETURNED, site_name, "takes part again", number))
        self.detach_reason = ""
        is_alone = len(record.members) == 1 < self.sites.count
        if is_alone and not self._was_alone:
            reason = "no other site is reachable, or came in time"
            events.insert(0, OuterEvent(ALONE, site_name, reason, number))
        self._was_alone = is_alone
        # Other sites may train on, if this outer step changed weights and had other members.
        has_changed = attempt.received is not None or record.fragment is not None
        self._others_train = has_changed and len(record.members) > 1
        # Log lines: the last few events, and samples that are skipped.
        self.events += events
        listed = [event for event in events if event.event in _WORDS]
        for event in listed[-_MOST_SHOWN:]:
            text = f"{event.who} {_WORDS[event.event]}: {event.reason}"
            self.notes.append(f"{step_text}, outer step {number}: {text}")
        if attempt.received is not None and record.step > attempt.step:
            self.notes.append(
                f"{step_text}: jumping to step {record.step}, where the other sites are; its "
                f"share of the samples of {record.step - attempt.step} steps is skipped"
            )

    def _metrics(self, attempt: Attempt) -> list[OuterStepMetrics]:
        """Return the metrics of an outer step that was made. Collective over this site."""
        record = attempt.record
        if record is None or record.fragment is None:
            return []
        rank_bytes, squares = self._ranks.all_gather(attempt.num_bytes), attempt.squares
        change, distance, count = self._ranks.sums(
            squares.change, squares.distance, squares.num_elements
        )
        distance_rms: float | None = math.sqrt(distance / max(1, count))
        if record.distances is not None:  # the server has computed the mean
            distance_rms = record.distances.get(str(self.sites.index))
        return [
            OuterStepMetrics(
                number=record.number,
                fragment=record.fragment,
                sites=record.sites,
                sent_bytes=sum(rank_bytes),
                link_bytes=max(rank_bytes) // max(1, len(record.members) - 1),
                seconds=attempt.seconds,
                waited_seconds=attempt.waited,
                change=math.sqrt(change / max(1, count)),
                distance=distance_rms,
            )
        ]
