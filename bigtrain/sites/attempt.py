"""One attempt at an outer step: what a rank gives and takes, before any of it counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.contribution import UnusableSiteError
from bigtrain.sites.exchange import WeightExchange
from bigtrain.sites.meeting.roster import Roster
from bigtrain.sites.meeting.start import LostSiteError
from bigtrain.sites.outer_state import OuterState

AnyExchange = WeightExchange
_Pair = tuple[torch.Tensor, torch.Tensor | None]
"""Global weights and momentum of a window."""


@dataclass
class Attempt:
    """An outer step of a fragment after `step`; None: only to take the weights of other sites.

    locals: the masters by window as they were, where they change meanwhile. taken: by fragment and
    window what other sites have as global weights and momentum. means, errors: by window of the
    fragment. roster: None where there was none. is_done: whether it counts, on all its sites;
    is_settled: whether the global weights are updated by it. failure: why it does not count;
    unusable: the site for which; error: which ended it. waited: seconds for other sites; seconds:
    of all, beside the steps.
    """

    fragment: int | None
    step: int
    locals: Sequence[torch.Tensor | None] = ()
    taken: list[list[_Pair]] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)
    errors: list[torch.Tensor | None] = field(default_factory=list)
    roster: Roster | None = None
    is_done: bool = False
    is_settled: bool = False
    num_bytes: int = 0
    thread: threading.Thread | None = None
    failure: str = ""
    unusable: int | None = None
    error: Exception | None = None
    waited: float = 0.0
    seconds: float = 0.0

    @property
    def has_taken(self) -> bool:
        """Whether it counts, and this site takes the weights of others by it."""
        return self.is_done and bool(self.taken)


def transfer(
    attempt: Attempt,
    roster: Roster,
    state: OuterState,
    exchange: AnyExchange,
    sites: SitesSection,
) -> None:
    """This rank's part of an exchange. Raises LostSiteError, on this rank alone."""
    before = exchange.num_bytes
    try:
        exchange.set_weights(roster.weights)
        if {roster.donor, *roster.takers} & {sites.index} and roster.takers:
            _give_or_take(attempt, roster, state, exchange, sites.index)
        if roster.fragment is not None:
            _take_means(attempt, roster.fragment, state, exchange)
    except UnusableSiteError as failure:
        site = roster.members[failure.position]
        raise LostSiteError(f"site {site} sent {failure}", site) from failure
    except RuntimeError as failure:
        raise LostSiteError(
            f"another site was lost, or took longer than sites.timeout_seconds = "
            f"{sites.timeout_seconds:g} for a transfer: {failure}"
        ) from failure
    attempt.num_bytes += exchange.num_bytes - before


def _give_or_take(
    attempt: Attempt, roster: Roster, state: OuterState, exchange: AnyExchange, site: int
) -> None:
    """Global weights and momentum, by way of copies where they are taken."""
    is_taker = site in roster.takers
    giver = roster.members.index(roster.donor)
    takers = [roster.members.index(site) for site in roster.takers]
    for fragment in range(state.num_fragments):
        windows = list(state.windows(fragment))
        weights = [w.weights.clone() if is_taker else w.weights for w in windows]
        exchange.send(fragment, windows, weights, giver, takers)
        momentum: list[torch.Tensor | None] = [None] * len(windows)
        if state.momentum is not None:
            there = [window.momentum for window in windows if window.momentum is not None]
            there = [one.clone() for one in there] if is_taker else there
            exchange.send(fragment, windows, there, giver, takers)
            momentum = [*there]
        if is_taker:
            attempt.taken.append(list(zip(weights, momentum, strict=True)))


def _take_means(attempt: Attempt, fragment: int, state: OuterState, exchange: AnyExchange) -> None:
    windows = list(state.windows(fragment))
    local: Sequence[torch.Tensor | None] = attempt.locals or [None] * len(windows)
    weights = [window.weights for window in windows]
    errors = [None if window.error is None else window.error.clone() for window in windows]
    if attempt.taken:  # what it has changed does not count
        weights = [one for one, _ in attempt.taken[fragment]]
        local = weights
        errors = [None if one is None else torch.zeros_like(one) for one in errors]
    attempt.means = exchange.means(fragment, windows, local, weights, errors)
    attempt.errors = errors
