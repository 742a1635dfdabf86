"""Rules of a round of the direct exchange: when it begins, with which sites, and their parts. No
state and no communication."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

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

    expected: sites that are alive and take part, those that wait among them. count: number of
    sites of the run.
    is_new: no outer step was made, and no site is from a checkpoint.
    """
    if not waiting:
        return False
    if is_new:
        return len(waiting) == count
    if not any(row.is_training for row in expected.values()):  # every site has just joined
        first = min(site_waiting.since for site_waiting in waiting.values())
        return len(waiting) == count or now - first >= window_seconds
    if expected.keys() <= waiting.keys():
        return True
    # Some sites are missing. The window begins with the first site at the newest outer step that
    # has a fragment to exchange; sites that are behind, or only take weights, wait for it.
    numbers = {site: row.number for site, row in expected.items()}
    numbers |= {site: site_waiting.entry.number for site, site_waiting in waiting.items()}
    newest = max(numbers.values())
    waiting_since = [
        site_waiting.since
        for site_waiting in waiting.values()
        if site_waiting.entry.fragment is not None and site_waiting.entry.number == newest
    ]
    return bool(waiting_since) and now - min(waiting_since) >= window_seconds


def plan_round(
    entries: Mapping[int, RoundEntry],
    last: Mapping[str, Any] | None,
    *,
    is_new: bool,
    generation: str,
    layouts: Mapping[int, str],
    plain: Sequence[str],
) -> RoundPlan:
    """Return the round of these sites after the outer step `last` (None: the first).

    If sites differ in their global weights or outer step, the group whose weights have seen most
    tokens gives its weights to all other sites (of several groups the largest, then the group of
    the smallest site).
    """
    # Groups of sites with equal weights, and the group whose weights stay.
    alike: dict[tuple[int, str], list[RoundEntry]] = {}
    for _, entry in sorted(entries.items()):
        alike.setdefault((entry.number, entry.digest), []).append(entry)
    best = max(alike.values(), key=lambda group: (group[0].tokens_seen, len(group), -group[0].site))

    # Sites of this group that exchange a fragment are in the mean, weighted by their tokens.
    fragment = next((entry.fragment for entry in best if entry.fragment is not None), None)
    giving = {
        entry.site: entry for entry in best if fragment is not None and entry.fragment == fragment
    }
    members = tuple(sorted(entries))
    tokens = [giving[site].tokens if site in giving else 0 for site in members]
    common = math.gcd(*tokens) or 1
    if fragment is None:  # no mean is taken
        takers = tuple(site for site in members if entries[site] not in best)
    else:
        takers = tuple(site for site in members if site not in giving)
    # A number names one set of weights: sites that continue from older weights get a new one.
    number, step = best[0].number, max(e.step for e in (list(giving.values()) or best))
    is_newest = last is None or (
        number == last["number"] and any(entry.site in last["members"] for entry in best)
    )
    if last is not None and not is_newest:
        number = max(number, int(last["number"]) + (fragment is None))
    # The run ends with the outer step after which no site that gives exchanges anything.
    gives_last = bool(giving) and all(entry.is_last for entry in giving.values())
    ended_step = step if gives_last else 0
    if last is not None and is_newest and fragment is None:
        ended_step = last["ended_step"]
    refusal = ""
    if is_new and len(alike) > 1:
        digests = ", ".join(f"{entry.digest} at site {site}" for site, entry in entries.items())
        refusal = (
            f"sites of a new run begin with different global weights ({digests}) -> give all of "
            "them the same model, seed and versions"
        )
    elif last is not None and not is_newest and last["ended_step"] >= best[0].last_step:
        refusal = _refuse_other_end(last, entries.keys())
    return RoundPlan(
        attempt=secrets.token_hex(8),
        generation=generation,
        members=members,
        sites=tuple(site for site, count in zip(members, tokens, strict=True) if count),
        weights=tuple(tokens_ // common for tokens_ in tokens),
        takers=takers,
        donor=min(giving) if giving else best[0].site,
        fragment=fragment,
        number=number + (fragment is not None),
        step=step,
        ended_step=ended_step,
        tokens_seen=best[0].tokens_seen + sum(tokens),
        layouts=dict(layouts),
        plain=tuple(plain),
        refusal=refusal,
    )


def _refuse_other_end(last: Mapping[str, Any], present: Set[int]) -> str:
    """Return why the sites `present`, without the weights with which the run ended in the
    outer step `last`, may not continue: other sites export these weights. An empty text if all
    the sites on which the run ended are here, so that no site has these weights any more."""
    away = ", ".join(map(str, sorted(set(last["members"]) - present)))
    if not away:
        return ""
    return (
        f"the run ended with outer step {last['number']}, after its last step "
        f"{last['ended_step']}, on site {away}, and no site that is here has these weights: the "
        f"export of site {away} is the run's -> use that export; to continue without it, from "
        "older weights, give the outer server a new --directory"
    )


def round_events(
    plan: RoundPlan, noted: Sequence[OuterEvent], before: Set[int]
) -> tuple[OuterEvent, ...]:
    """Return what happened to the sites since the outer step of those `before`: `noted` events, and
    who is missing or back."""
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
    returned = {event.who for event in events if event.event == RETURNED}
    # Once, though it has joined as well.
    noted = [event for event in noted if event.event != RETURNED or event.who not in returned]
    return (*noted, *events)
