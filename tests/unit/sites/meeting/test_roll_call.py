"""Who takes part in an outer step, by real doors of sites in threads: lost, late, and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bigtrain.errors import TrainingError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.meeting.doors import Door
from bigtrain.sites.meeting.roll_call import RollCall
from bigtrain.sites.meeting.roster import Presence, Roster, agreed_roster
from bigtrain.sites.metrics import LEFT_OUT, RETURNED

LIMIT = 1.6
HERE = Presence(0, 3, 30, 0, 100, "same", 300)
"""At its fourth outer step."""


def sites(count: int = 3, limit: float = LIMIT) -> list[RollCall]:
    """Sites that have started together."""
    doors = [Door.served("127.0.0.1", 0) for _ in range(count)]
    places = {site: door.place for site, door in enumerate(doors)}
    started = {site: f"start of {site}" for site in range(count)}
    return [
        RollCall(
            SitesSection(
                count=count,
                index=site,
                inner_steps=10,
                address="127.0.0.1:1",
                timeout_seconds=limit,
            ),
            door,
            set(range(count)),
            places,
            started,
        )
        for site, door in enumerate(doors)
    ]


def met(calls: Mapping[int, RollCall], **changes: Mapping[int, Any]) -> dict[int, Roster | None]:
    """What each of them gets as it comes to an outer step. changes: of its `HERE`, by site."""

    def one(site: int) -> Roster | None:
        own = {name: of[site] for name, of in changes.items() if site in of}
        return calls[site].gather(replace(HERE, site=site, **own))

    return dict(zip(calls, together(list(calls), one), strict=True))


def together(items: Sequence[int], act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as threads:
        return list(threads.map(act, items))


def decided(calls: Mapping[int, RollCall], roster: Roster, *failed: int) -> set[bool]:
    def one(site: int) -> bool:
        return calls[site].decide(roster, is_done=site not in failed)

    return set(together(list(calls), one))


def end(call: RollCall) -> None:
    """As if its process had ended."""
    call.end()
    call.door.store = None


@pytest.fixture
def three() -> dict[int, RollCall]:
    return dict(enumerate(sites()))


def test_all_take_part_by_their_tokens_and_keep_their_groups(three: dict[int, RollCall]) -> None:
    found = met(three, tokens={0: 100, 1: 300, 2: 100})
    roster = found[0]
    assert roster is not None
    assert found == {site: roster for site in three}
    assert (roster.members, roster.weights, roster.takers) == ((0, 1, 2), (1, 3, 1), ())
    assert (roster.number, roster.step, roster.seen, roster.generation) == (4, 30, 800, "start")
    assert decided(three, roster) == {True}
    again = met(three, number=dict.fromkeys(three, 4))[0]
    assert again is not None
    assert (again.number, again.generation, again.events) == (5, "start", ())
    assert again.attempt != roster.attempt


def test_who_does_not_come_is_left_out_and_takes_the_weights_when_it_is_back(
    three: dict[int, RollCall],
) -> None:
    begun = time.monotonic()
    two = {0: three[0], 1: three[1]}
    roster = met(two)[0]
    assert roster is not None
    assert time.monotonic() - begun < LIMIT + 1
    assert (roster.sites, roster.generation != "start") == ((0, 1), True)
    assert [(one.event, one.who) for one in roster.events] == [(LEFT_OUT, "site 2")]
    assert decided(two, roster) == {True}
    # It comes late: the others are in their next window. It is away until they call it.
    late = {2: three[2]}
    assert met(late) == {2: None}
    assert three[2].is_away
    assert not three[2].is_called()

    def next_step(site: int) -> Roster | None:
        if site < 2:
            number, seen = 4, roster.seen
            return three[site].gather(replace(HERE, site=site, number=number, seen=seen))
        while not three[2].is_called():
            time.sleep(0.05)
        return three[2].gather(replace(HERE, site=2, fragment=None))

    back = together([0, 1, 2], next_step)
    assert back[0] == back[1] == back[2]
    assert (back[0].members, back[0].weights) == ((0, 1, 2), (1, 1, 0))
    assert (back[0].takers, back[0].donor) == ((2,), 0)
    assert [(one.event, one.who) for one in back[0].events] == [(RETURNED, "site 2")]
    assert decided(three, back[0]) == {True}
    assert not three[2].is_away
    whole = met(three, number=dict.fromkeys(three, 5), seen=dict.fromkeys(three, back[0].seen))
    assert whole[2] is not None
    assert whole[2].sites == (0, 1, 2)
    assert whole[2].generation == back[0].generation


def test_the_next_one_leads_where_the_leader_has_ended(three: dict[int, RollCall]) -> None:
    end(three.pop(0))
    begun = time.monotonic()
    found = met(three)
    assert time.monotonic() - begun < LIMIT
    assert found[1] == found[2]
    assert found[1] is not None
    assert (found[1].leader, found[1].sites) == (1, (1, 2))
    assert ("site 0", "cannot be reached") in {(o.who, o.reason) for o in found[1].events}
    assert decided(three, found[1]) == {True}
    end(three.pop(1))
    alone = met(three)[2]
    assert alone is not None
    assert (alone.sites, alone.number) == ((2,), 4)


def test_an_attempt_counts_only_where_all_have_done_their_part(three: dict[int, RollCall]) -> None:
    roster = met(three)[0]
    assert roster is not None
    gone = three.pop(2)
    end(gone)
    assert decided(three, roster) == {False}
    again = met(three)[0]
    assert again is not None
    assert (again.sites, again.number) == ((0, 1), 4)
    assert [(o.who, o.reason) for o in again.events] == [("site 2", "was lost during the exchange")]
    assert decided(three, again) == {True}


def test_sites_that_cannot_reach_each_other_are_parted(three: dict[int, RollCall]) -> None:
    """All reach the leader, and the exchange fails again."""
    for _ in range(2):
        roster = met(three)[0]
        assert roster is not None
        assert roster.sites == (0, 1, 2)
        assert decided(three, roster, 1, 2) == {False}
    last = three.pop(2)
    roster = met(three)[0]
    assert roster is not None
    assert roster.sites == (0, 1)
    last.leave()


def test_weights_that_have_seen_more_tokens_stay() -> None:
    """Though more sites have others; and those are not of the mean."""
    there = {0: (300, "a"), 1: (300, "a"), 2: (301, "b"), 3: (301, "b")}
    present = {
        site: replace(HERE, site=site, seen=seen, digest=digest, step=10 * site)
        for site, (seen, digest) in there.items()
    }
    roster = agreed_roster({**present, 4: replace(present[0], site=4)}, 0, ("a", 1), "g")
    assert (roster.members, roster.weights) == ((0, 1, 2, 3, 4), (0, 0, 1, 1, 0))
    assert (roster.takers, roster.donor, roster.step, roster.seen) == ((0, 1, 4), 2, 30, 501)
    del present[3]
    larger = agreed_roster(present | {2: replace(present[2], seen=300)}, 0, ("a", 1), "g")
    assert (larger.takers, larger.donor) == ((2,), 0)
    other = agreed_roster({**present, 2: replace(present[0], site=2, fragment=1)}, 0, ("a", 1), "g")
    assert (other.fragment, other.sites) == (0, (0, 1))


def test_the_group_that_has_seen_less_comes_to_the_other(three: dict[int, RollCall]) -> None:
    """After a link was cut: each side has gone on by itself."""
    apart = {2: three[2]}
    for door in (0, 1):
        three[2]._succeed(f"the link to {door} is cut")
    rosters = [met(apart)[2], met({0: three[0], 1: three[1]})[0]]
    for group, roster in zip((apart, {0: three[0], 1: three[1]}), rosters, strict=True):
        assert roster is not None
        assert decided(group, roster) == {True}
    seen = {0: 500, 1: 500, 2: 400}
    end_at = time.monotonic() + 20
    while not three[2].is_away:
        assert time.monotonic() < end_at
        three[2].is_called()
        time.sleep(0.05)

    def next_step(site: int) -> Roster | None:
        own = replace(HERE, site=site, number=4, seen=seen[site], digest=f"of {seen[site]}")
        if site < 2:
            return three[site].gather(own)
        while not three[2].is_called():
            time.sleep(0.05)
        return three[2].gather(replace(own, fragment=None))

    back = together([0, 1, 2], next_step)
    assert back[0] == back[2]
    assert (back[0].takers, back[0].sites, back[0].seen) == ((2,), (0, 1), 700)


def test_new_runs_with_other_weights_are_told_apart(three: dict[int, RollCall]) -> None:
    begins = {site: None for site in three}
    zeros = dict.fromkeys(three, 0)
    found = met(three, fragment=begins, number=zeros, seen=zeros, digest={0: "a", 1: "a", 2: "b"})[
        1
    ]
    assert found is not None
    assert found.digests == {0: "a", 1: "a", 2: "b"}
    assert (found.number, found.fragment, found.takers) == (0, None, (2,))


def test_what_strangers_write_at_a_door_changes_nothing(three: dict[int, RollCall]) -> None:
    stranger = Door.reached(three[0].door.place)
    for key, tree in (("ask/1", [1]), ("knock/2", "x"), ("card/2", {"leader": 9})):
        stranger.set(key, tree)
    stranger.store.set("ask/2", "\x80 no JSON")
    roster = met(three)[0]
    assert roster is not None
    assert roster.sites == (0, 1, 2)


def test_a_site_whose_values_cannot_be_used_is_left_out_until_it_starts_again(
    three: dict[int, RollCall],
) -> None:
    """Also where all others can be reached: it asks again, and is not answered."""
    roster = met(three)[0]
    assert roster is not None

    def one(site: int) -> bool:
        return three[site].decide(roster, is_done=False, unusable=2 if site == 1 else None)

    assert together([0, 1, 2], one) == [False] * 3
    found = met(three)  # site 2 asks, and is given no answer within its limit
    assert found[2] is None or found[2].members == (2,)
    rest = found[0]
    assert rest is not None
    assert rest.members == (0, 1)
    reasons = {event.who: event.reason for event in rest.events}
    assert reasons == {"site 2": "sent values that are not finite, or moved too far"}


def test_a_leader_whose_values_cannot_be_used_ends(three: dict[int, RollCall]) -> None:
    roster = met(three)[0]
    assert roster is not None

    def one(site: int) -> Any:
        try:
            return three[site].decide(roster, is_done=False, unusable=0 if site else None)
        except TrainingError as error:
            return str(error)

    found = together([0, 1, 2], one)
    assert found[0].startswith("site 0 sent the other sites values that are not finite")
    assert found[1:] == [False, False]


def test_the_others_are_told_why_a_site_left(three: dict[int, RollCall]) -> None:
    assert met(three)[0] is not None
    three[2].leave("a change with NaN or an infinity")
    end(three[2])
    found = met({site: three[site] for site in (0, 1)})[0]
    assert found is not None
    assert {e.who: e.reason for e in found.events} == {"site 2": "a change with NaN or an infinity"}
