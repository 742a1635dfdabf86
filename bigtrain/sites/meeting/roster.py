"""What sites tell each other about an outer step, and who takes part in it. No communication."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bigtrain.sites.meeting.doors import Place, place_of
from bigtrain.sites.metrics import OuterEvent


@dataclass(frozen=True)
class Presence:
    """What a site says of itself. number: of its last outer step; step: of its training; fragment:
    that it would exchange, None if it only takes weights; tokens: that it has trained on since the
    last exchange; digest: of its global weights; seen: tokens that those have seen, on all sites.
    """

    site: int
    number: int
    step: int
    fragment: int | None
    tokens: int
    digest: str
    seen: int

    @classmethod
    def from_json(cls, site: int, tree: Mapping[str, Any]) -> Presence:
        """What `site` says. Raises KeyError, TypeError, ValueError for what is none."""
        numbers = {name: int(tree[name]) for name in ("number", "step", "tokens", "seen")}
        fragment = None if tree["fragment"] is None else int(tree["fragment"])
        return cls(site=site, fragment=fragment, digest=str(tree["digest"]), **numbers)


@dataclass(frozen=True)
class Roster:
    """Who takes part in an attempt at an outer step, and how.

    members: all that exchange, ascending, with `weights` in the mean, 0 for the `takers`, which
    first take the global weights of `donor`. fragment: None where weights are only taken. number,
    seen: after it; step: of the sites that give the mean. generation: of the groups of ranks, which
    meet at `place`. digests: of the global weights by site, where they are of a new run and differ.
    """

    attempt: str
    generation: str
    leader: int
    place: Place
    members: tuple[int, ...]
    weights: tuple[int, ...]
    takers: tuple[int, ...]
    donor: int
    fragment: int | None
    number: int
    step: int
    seen: int
    events: tuple[OuterEvent, ...] = ()
    digests: Mapping[int, str] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[int, ...]:
        """Those whose weights are in the mean."""
        return tuple(s for s, w in zip(self.members, self.weights, strict=True) if w)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Roster:
        """Of `dataclasses.asdict` by way of JSON."""
        return cls(
            **{
                **tree,
                "place": place_of(tree["place"]),
                **{key: tuple(tree[key]) for key in ("members", "weights", "takers")},
                "events": tuple(OuterEvent(**one) for one in tree["events"]),
                "digests": {int(site): text for site, text in tree["digests"].items()},
            }
        )


def agreed_roster(
    present: Mapping[int, Presence], leader: int, place: Place, generation: str
) -> Roster:
    """The roster of those that are `present`, by site.

    Of sites that have other global weights, or stand after another outer step, those whose weights
    have seen most tokens stay (of several groups the larger one, then that of the smallest site):
    the others take theirs.
    """
    alike: dict[tuple[int, str], list[Presence]] = {}
    for _, one in sorted(present.items()):
        alike.setdefault((one.number, one.digest), []).append(one)
    best = max(alike.values(), key=lambda group: (group[0].seen, len(group), -group[0].site))
    fragment = next((one.fragment for one in best if one.fragment is not None), None)
    giving = {one.site: one for one in best if fragment is not None and one.fragment == fragment}
    members = tuple(sorted(present))
    tokens = [giving[site].tokens if site in giving else 0 for site in members]
    common = math.gcd(*tokens) or 1
    if fragment is None:  # no mean is taken
        takers = tuple(site for site in members if present[site].digest != best[0].digest)
    else:
        takers = tuple(site for site in members if site not in giving)
    is_new = all(one.number == 0 for one in present.values())
    return Roster(
        attempt=secrets.token_hex(6),
        generation=generation,
        leader=leader,
        place=place,
        members=members,
        weights=tuple(count // common for count in tokens),
        takers=takers,
        donor=min(giving) if giving else best[0].site,
        fragment=fragment,
        number=best[0].number + (fragment is not None),
        step=max(one.step for one in (list(giving.values()) or best)),
        seen=best[0].seen + sum(tokens),
        digests={site: one.digest for site, one in present.items()}
        if is_new and len(alike) > 1
        else {},
    )
