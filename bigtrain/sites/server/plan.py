"""Rules of a round of the direct exchange: when it begins, with which sites, and their parts in it.
No state and no communication."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from bigtrain.sites.metrics import LEFT_OUT, RETURNED, OuterEvent
from bigtrain.sites.protocol import RoundEntry, RoundPlan
from bigtrain.sites.server.store import SiteRow


@dataclass(frozen=True)
class Waiting:
    """A site at an outer step. since: seconds of the clock."""

    entry: RoundEntry
    since: float


def due(
    waiting: Mapping[int, Waiting],
    expected: Mapping[int, SiteRow],
    count: int,
    *,
    is_new: bool,
    window_seconds: float,
    now: float,
) -> bool:
    """Return whether the sites that are `waiting` begin a round now.

    expected: sites that are alive and take part, those that wait among them. count: of the run.
    is_new: no round was made, and no site is from a checkpoint.
    """
    if not waiting:
        return False
    if is_new:
        return len(waiting) == count
    if not any(row.is_training for row in expected.values()):  # all begin
        first = min(one.since for one in waiting.values())
        return len(waiting) == count or now - first >= window_seconds
    if expected.keys() <= waiting.keys():
        return True
    # Sites that are behind, or begin, wait for those that are further.
    numbers = {site: row.number for site, row in expected.items()}
    numbers |= {site: one.entry.number for site, one in waiting.items()}
    newest = max(numbers.values())
    giving = [
        one.since
        for one in waiting.values()
        if one.entry.fragment is not None and one.entry.number == newest
    ]
    return bool(giving) and now - min(giving) >= window_seconds


def plan_round(
    entries: Mapping[int, RoundEntry],
    *,
    is_new: bool,
    generation: str,
    layouts: Mapping[int, str],
    plain: Sequence[str],
) -> RoundPlan:
    """Return the round of these sites.

    Of sites that have other global weights, or are after another outer step, those whose weights
    have seen most tokens stay (of several groups the larger one, then that of the smallest site):
    the others take theirs.
    """
    alike: dict[tuple[int, str], list[RoundEntry]] = {}
    for _, one in sorted(entries.items()):
        alike.setdefault((one.number, one.digest), []).append(one)
    best = max(alike.values(), key=lambda group: (group[0].tokens_seen, len(group), -group[0].site))
    fragment = next((one.fragment for one in best if one.fragment is not None), None)
    giving = {one.site: one for one in best if fragment is not None and one.fragment == fragment}
    members = tuple(sorted(entries))
    tokens = [giving[site].tokens if site in giving else 0 for site in members]
    common = math.gcd(*tokens) or 1
    if fragment is None:  # no mean is taken
        takers = tuple(site for site in members if entries[site] not in best)
    else:
        takers = tuple(site for site in members if site not in giving)
    differ = is_new and len(alike) > 1
    return RoundPlan(
        attempt=secrets.token_hex(8),
        generation=generation,
        members=members,
        weights=tuple(tokens_ // common for tokens_ in tokens),
        takers=takers,
        donor=min(giving) if giving else best[0].site,
        fragment=fragment,
        number=best[0].number + (fragment is not None),
        step=max(one.step for one in (list(giving.values()) or best)),
        tokens_seen=best[0].tokens_seen + sum(tokens),
        layouts=dict(layouts),
        plain=tuple(plain),
        digests={site: one.digest for site, one in entries.items()} if differ else {},
    )


def round_events(
    plan: RoundPlan, noted: Sequence[OuterEvent], before: Set[int]
) -> tuple[OuterEvent, ...]:
    """Return what happened to the sites since the round of those `before`: `noted` events, and who
    is missing or back."""
    number, named_sites = plan.number, {event.who for event in noted}
    events = [
        OuterEvent(LEFT_OUT, f"site {site}", "missed the outer step", number)
        for site in sorted(before - set(plan.members))
        if f"site {site}" not in named_sites
    ]
    for site in plan.members:
        if site in plan.takers or site not in before:
            does = "takes the global weights" if site in plan.takers else "takes part again"
            events.append(OuterEvent(RETURNED, f"site {site}", does, number))
    back = {event.who for event in events if event.event == RETURNED}
    # Once, though it has joined as well.
    noted = [one for one in noted if one.event != RETURNED or one.who not in back]
    return (*noted, *events)
