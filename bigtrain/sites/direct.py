"""Outer steps by connections between the ranks of different sites, which the server introduces."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import LaunchError
from bigtrain.models.torch_patches import gloo_group
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.attempt import Attempt, BucketState
from bigtrain.sites.client import DetachedError
from bigtrain.sites.codecs import CODECS
from bigtrain.sites.contribution import UnusableSiteError
from bigtrain.sites.exchange import SiteGroup, Tensors, WeightExchange, rectangles_of
from bigtrain.sites.membership import Membership, ServerStore
from bigtrain.sites.outer_state import OuterState, replicated_names
from bigtrain.sites.protocol import Header, RoundPlan, digest_of
from bigtrain.sites.site_ranks import SiteRanks

_ENTRY_FIELDS = ("number", "step", "last_step", "fragment", "is_last", "tokens", "tokens_seen")
"""Fields of an `Attempt` that are sent with the request to enter it."""


class _Failure(NamedTuple):
    """Why transfers failed, empty if they did not; the site whose values cannot be used, if any."""

    reason: str = ""
    unusable_site: int | None = None


class DirectSteps:
    """Outer steps with the sites of a `RoundPlan`: their ranks exchange means by gloo, every site
    votes, and the step counts if the server commits it, for all its members or for none.

    membership: None for a single site, which has nothing to exchange. on_wait: called on the main
    rank while other sites train and this site waits.
    """

    def __init__(
        self,
        engine: TrainEngine,
        sites: SitesSection,
        ranks: SiteRanks,
        membership: Membership | None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self._sites = sites
        self._on_wait = on_wait
        self._ranks = ranks
        self._membership = membership
        # Parameters replicated inside a site are sent in float32 by every site.
        self._plain = sorted(replicated_names(engine)) if CODECS[sites.codec].keeps_error else []
        self.state = OuterState(engine, sites, self._plain)
        self._exchange: WeightExchange | None = None
        self._generation: str | None = None

    def begin(self, header: Header) -> None:
        """Join the run by a request with the fields of `header`. Raises LaunchError."""
        membership = self._membership
        if membership is None:
            return
        document = self._layout_document()
        header = {**header, "layout": digest_of(document), "plain": self._plain}

        def join() -> None:
            if membership.join(header).get("needs_layout", True):
                membership.ask("layout", {}, payload=document)

        self._ranks.on_main(join)

    def make(self, attempt: Attempt) -> None:
        """Fill in the results of an attempt; may run in a thread next to training. Raises
        LaunchError, TrainingError if this site cannot continue."""
        try:
            self._make(attempt)
        except DetachedError as error:
            self._close()
            attempt.detach_reason = str(error)

    def _make(self, attempt: Attempt) -> None:
        """Enter, make the transfers of the plan, vote, and set the results of the verdict."""
        started_at = time.perf_counter()
        plan = self._plan(attempt)
        attempt.waited = time.perf_counter() - started_at
        if plan.refusal:
            raise LaunchError(plan.refusal)
        # Parameters that any site replicates are sent in float32 by every site.
        failure = _Failure("sites hold other parameters several times than before")
        has_same_plain = self.state.plain == set(plan.plain)
        if has_same_plain:
            failure = self._try_transfers(attempt, plan)
        # The outer step counts for all members or for none, as the server decides. Without the
        # server's answer DetachedError is raised, and the outer step does not count here.
        membership, is_committed = self._membership, not failure.reason
        if membership is not None:
            is_done, unusable = is_committed, failure.unusable_site
            vote = partial(membership.commit, plan.attempt, is_done=is_done, unusable=unusable)
            is_committed = self._ranks.on_main(vote)
        if not is_committed:
            attempt.failure = failure.reason or "another site was lost"
            self._close()
            if not has_same_plain and membership is not None:
                # Take over what other sites send in float32, for the next attempt.
                self.state.set_plain(plan.plain)
                document = self._layout_document()
                self._ranks.on_main(lambda: membership.ask("layout", {}, payload=document))
            return
        attempt.record, attempt.events = plan, list(plan.events)

    def _plan(self, attempt: Attempt) -> RoundPlan:
        """Enter the attempt; return the plan. Collective over the site."""
        membership = self._membership
        if membership is None:
            return _plan_of_only_site(attempt, self.state.plain)
        checksum = sum(self._ranks.all_gather(self.state.checksum())) % (1 << 64)
        entry = {name: getattr(attempt, name) for name in _ENTRY_FIELDS}
        entry["digest"] = f"{checksum:016x}"
        # An attempt in a thread does not report waiting: the main thread trains.
        on_wait = self._on_wait if attempt.future is None else None
        return self._ranks.on_main(lambda: membership.enter(entry, on_wait))

    def _try_transfers(self, attempt: Attempt, plan: RoundPlan) -> _Failure:
        """Make the transfers of the plan; return why they failed on a rank, with preference for a
        failure that names a site. Changes only the attempt. Collective over the site."""
        layouts = None
        if plan.generation != self._generation:
            self._close()
            layouts = self._layouts(attempt, plan)

        def transfer() -> _Failure:
            try:
                if layouts is not None:
                    self._open(plan, layouts)
                self._transfer(attempt, plan)
            except UnusableSiteError as error:
                site = plan.members[error.position]
                return _Failure(f"site {site} sent {error}", site)
            except (RuntimeError, DetachedError) as error:
                return _Failure(
                    "a site was lost, cannot be reached on any port of its hosts, or took longer "
                    f"than sites.timeout_seconds = {self._sites.timeout_seconds:g}: {error}"
                )
            return _Failure()

        rank_results = self._ranks.all_gather(self._ranks.on_all(transfer))
        failures = [result for result in rank_results if result.reason]
        return max(failures, key=lambda f: f.unusable_site is not None, default=_Failure())

    # Layouts and groups of ranks

    def _layout_document(self) -> bytes:
        """Return the rectangles of every rank of this site, in order and with a checksum, as JSON.
        Collective over the site."""
        rank_layout = {
            "parts": self.state.layout_checksum(),
            "rectangles": rectangles_of(self.state),
        }
        return json.dumps({"ranks": self._ranks.all_gather(rank_layout)}).encode()

    def _layouts(self, attempt: Attempt, plan: RoundPlan) -> list[list[Any]]:
        """Return the rectangles of every member, by rank, as JSON; empty if the layouts of all
        members are equal. Collective over the site."""
        if len(set(plan.layouts.values())) <= 1:
            return []
        membership = self._membership
        assert membership is not None

        def fetch() -> list[list[Any]]:
            documents: dict[str, Any] = {}
            for site, digest in plan.layouts.items():
                if digest not in documents:
                    _, payload = membership.fetch("layout_of", {"of_site": site})
                    documents[digest] = json.loads(bytes(payload))
            member_layouts = [documents[plan.layouts[site]] for site in plan.members]
            return [[rank["rectangles"] for rank in layout["ranks"]] for layout in member_layouts]

        layouts = self._ranks.on_main(fetch)
        sizes = ", ".join(str(len(site_layout)) for site_layout in layouts)
        attempt.notes.append(f"sites differ in layout ({sizes} ranks): they exchange by rectangles")
        return layouts

    def _open(self, plan: RoundPlan, layouts: Sequence[Sequence[Any]]) -> None:
        """Connect this rank to its peers at other sites. Raises RuntimeError."""
        position, rank = plan.members.index(self._sites.index), self._ranks.rank
        if not layouts:
            exchange = WeightExchange.by_shards(self.state, (rank,) * len(plan.members))
        else:
            try:
                exchange = WeightExchange.by_rectangles(self.state, layouts, position, rank)
            except ValueError as error:
                raise LaunchError(
                    f"the layout of another site does not fit this model: {error}"
                ) from error
        groups = {}
        for ranks in exchange.ranks:
            group = None
            if len(plan.members) > 1:
                assert self._membership is not None
                store = ServerStore(self._membership, plan.generation, "-".join(map(str, ranks)))
                timeout = timedelta(seconds=self._sites.timeout_seconds)
                address = self._membership.own_address()
                group = gloo_group(store, position, len(plan.members), timeout, address)
            groups[ranks] = SiteGroup(group, plan.weights)
        exchange.groups = groups
        self._exchange, self._generation = exchange, plan.generation

    def _close(self) -> None:
        """Close the connections by dropping their groups, so that no rank waits for this rank."""
        self._exchange, self._generation = None, None

    # Transfers

    def _transfer(self, attempt: Attempt, plan: RoundPlan) -> None:
        """Transfer this rank's part. Raises UnusableSiteError, RuntimeError."""
        exchange = self._exchange
        assert exchange is not None
        bytes_before = exchange.num_bytes
        exchange.set_site_weights(plan.weights)
        # First the global weights of sites that are behind.
        received: list[list[BucketState]] = []
        if plan.takers and self._sites.index in (plan.donor, *plan.takers):
            received = self._transfer_states(plan, exchange)
            if received:
                attempt.received = list(chain.from_iterable(received))
        # Then the means of a fragment.
        if plan.fragment is not None:
            buckets = list(self.state.buckets(plan.fragment))
            local: Tensors = attempt.local or [None] * len(buckets)
            weights = [bucket.weights for bucket in buckets]
            errors = [None if bucket.error is None else bucket.error.clone() for bucket in buckets]
            if received:  # this site's own change does not count: it has the received weights
                weights = [state.weights for state in received[plan.fragment]]
                local = weights
                errors = [None if error is None else torch.zeros_like(error) for error in errors]
            attempt.means = exchange.means(plan.fragment, buckets, local, weights, errors)
            attempt.errors = errors
        attempt.num_bytes = exchange.num_bytes - bytes_before

    def _transfer_states(
        self, plan: RoundPlan, exchange: WeightExchange
    ) -> list[list[BucketState]]:
        """Send or receive global weights and momentum. Return the received states by fragment and
        bucket on a site that takes them; an empty list on the donor."""
        is_taker = self._sites.index in plan.takers
        donor = plan.members.index(plan.donor)
        takers = [plan.members.index(site) for site in plan.takers]
        received = []
        # Takers receive into copies, since the outer step may not count.
        for fragment in range(self.state.num_fragments):
            buckets = list(self.state.buckets(fragment))
            weights = [bucket.weights.clone() if is_taker else bucket.weights for bucket in buckets]
            exchange.send(fragment, weights, donor, takers)
            momenta: list[torch.Tensor | None] = [None] * len(buckets)
            if self.state.momentum is not None:  # then every bucket has one
                sent = [bucket.momentum for bucket in buckets if bucket.momentum is not None]
                sent = [momentum.clone() for momentum in sent] if is_taker else sent
                exchange.send(fragment, sent, donor, takers)
                momenta = [*sent]
            received.append(list(map(BucketState, weights, momenta)))
        return received if is_taker else []


def _plan_of_only_site(attempt: Attempt, plain: Iterable[str]) -> RoundPlan:
    """Return the plan of the only site of a run."""
    fragment = attempt.fragment
    return RoundPlan(
        members=(0,),
        sites=(0,),
        weights=(1,),
        donor=0,
        fragment=fragment,
        # The start of a run has no fragment, and is not counted as an outer step.
        number=attempt.number if fragment is None else attempt.number + 1,
        step=attempt.step,
        ended_step=attempt.step if attempt.is_last else 0,
        tokens_seen=attempt.tokens_seen + attempt.tokens,
        plain=tuple(plain),
    )
