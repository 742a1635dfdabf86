"""Rules of a round of the direct exchange: when it begins, and what each site does. No state
and no communication."""

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

    expected: sites that are alive and take part, including the waiting sites. count: number of
    sites of the run. is_new: no outer step was made, and no site is from a checkpoint.
    """
    if not waiting:
        return False
    if is_new:
        return len(waiting) == count
    if not any(row.is_training for row in expected.values()):  # every site has just joined
        waits_since = min(site_waiting.since for site_waiting in waiting.values())
        return len(waiting) == count or now - waits_since >= window_seconds
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
    groups: dict[tuple[int, str], list[RoundEntry]] = {}
    for _, entry in sorted(entries.items()):
        groups.setdefault((entry.number, entry.digest), []).append(entry)
    best = max(
        groups.values(), key=lambda group: (group[0].tokens_seen, len(group), -group[0].site)
    )
    best_weights = best[0]  # number, tokens_seen and digest are equal in a group

    # Sites of this group that exchange a fragment are in the mean, weighted by their tokens.
    fragment = next((entry.fragment for entry in best if entry.fragment is not None), None)
    averaged = {
        entry.site: entry for entry in best if fragment is not None and entry.fragment == fragment
    }
    members = tuple(sorted(entries))
    tokens = [averaged[site].tokens if site in averaged else 0 for site in members]
    divisor = math.gcd(*tokens) or 1
    if fragment is None:  # no mean is taken
        takers = tuple(site for site in members if entries[site] not in best)
    else:
        takers = tuple(site for site in members if site not in averaged)
    # A number names one set of weights: sites that continue from older weights get a new number
    # (an exchange of a fragment adds 1 to it below).
    number = best_weights.number
    step = max(entry.step for entry in (list(averaged.values()) or best))
    is_newest = last is None or (
        number == last["number"] and any(entry.site in last["members"] for entry in best)
    )
    if last is not None and not is_newest:
        number = max(number, int(last["number"]) + (fragment is None))
    # The run ends with the outer step that is the last exchange of every averaged site.
    is_last_exchange = bool(averaged) and all(entry.is_last for entry in averaged.values())
    ended_step = step if is_last_exchange else 0
    if last is not None and is_newest and fragment is None:
        ended_step = last["ended_step"]
    refusal = ""
    if is_new and len(groups) > 1:
        digests = ", ".join(f"{entry.digest} at site {site}" for site, entry in entries.items())
        refusal = (
            f"sites of a new run begin with different global weights ({digests}) -> give all of "
            "them the same model, seed and versions"
        )
    elif last is not None and not is_newest and last["ended_step"] >= best_weights.last_step:
        refusal = _refusal_of_second_end(last, entries.keys())
    return RoundPlan(
        attempt=secrets.token_hex(8),
        generation=generation,
        members=members,
        sites=tuple(site for site, count in zip(members, tokens, strict=True) if count),
        weights=tuple(site_tokens // divisor for site_tokens in tokens),
        takers=takers,
        donor=min(averaged) if averaged else best[0].site,
        fragment=fragment,
        number=number + (fragment is not None),
        step=step,
        ended_step=ended_step,
        tokens_seen=best_weights.tokens_seen + sum(tokens),
        layouts=dict(layouts),
        plain=tuple(plain),
        refusal=refusal,
    )


def _refusal_of_second_end(last: Mapping[str, Any], present: Set[int]) -> str:
    """Return why the sites `present`, which lack the weights with which the run ended in the outer
    step `last`, may not continue: absent sites export these weights. Return an empty text if all
    sites on which the run ended are present, so that no site has these weights any more."""
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
    plan: RoundPlan, noted: Sequence[OuterEvent], last_members: Set[int]
) -> tuple[OuterEvent, ...]:
    """Return the events of a round: the `noted` events, and the sites that are missing or back
    since the last outer step."""
    number, named_sites = plan.number, {event.who for event in noted}
    events = [
        OuterEvent(LEFT_OUT, f"site {site}", "missed the outer step", number)
        for site in sorted(last_members - set(plan.members))
        if f"site {site}" not in named_sites
    ]
    for site in plan.members:
        if site in plan.takers or site not in last_members:
            reason = "takes the global weights" if site in plan.takers else "takes part again"
            events.append(OuterEvent(RETURNED, f"site {site}", reason, number))
    returned = {event.who for event in events if event.event == RETURNED}
    # A site that has joined again, which is noted as a return, returns only once.
    noted = [event for event in noted if event.event != RETURNED or event.who not in returned]
    return (*noted, *events)
