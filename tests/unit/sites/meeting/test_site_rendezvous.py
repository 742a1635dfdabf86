"""Sites that meet, in threads: what is compared, and what is said of one that is not there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bigtrain.errors import LaunchError
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites.meeting.doors import Door
from bigtrain.sites.meeting.roster import Presence
from bigtrain.sites.meeting.site_rendezvous import SiteRendezvous
from bigtrain.sites.meeting.start import Facts, Known, refuse_differences
from bigtrain.system.world import World
from tests.support.worlds import free_port

ALONE = World(0, 1, 0)


def section(index: int, port: int, seconds: float = 20.0) -> SitesSection:
    return SitesSection(
        count=2,
        index=index,
        inner_steps=1,
        address=f"127.0.0.1:{port}",
        timeout_seconds=seconds,
    )


def met(
    act: Callable[[int, SiteRendezvous], Any], facts: tuple[Facts, Facts] = ({}, {})
) -> list[Any]:
    """What `act` returns, or the text of its error, for two sites that join."""
    port = free_port()

    def of_site(index: int) -> Any:
        try:
            rendezvous = SiteRendezvous.join(section(index, port, 20.0), ALONE, facts[index])
            found = act(index, rendezvous)
            rendezvous.close()
        except LaunchError as error:
            return str(error)
        return found

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(of_site, range(2)))


def test_what_sites_tell_all_of_them_hear() -> None:
    def act(index: int, rendezvous: SiteRendezvous) -> Any:
        assert rendezvous.members == (0, 1)
        assert rendezvous.position == index
        return rendezvous.tell("one", {"index": index}), rendezvous.tell("two", index)

    assert met(act) == [([[{"index": 0}], [{"index": 1}]], [[0], [1]])] * 2


def test_facts_that_differ_are_refused_on_all_sites_with_both_values() -> None:
    found = met(lambda index, rendezvous: None, ({"a": 1, "b": 2}, {"a": 1, "b": 3}))
    assert found[0] == found[1]
    assert "\n  b: 2 at site 0, 3 at site 1" in found[0]
    assert "  a:" not in found[0]


def test_a_site_alone_meets_nobody() -> None:
    sites = SitesSection(count=1, inner_steps=1)
    rendezvous = SiteRendezvous.join(sites, ALONE, {})
    assert rendezvous.open_group((0,)) is None
    assert rendezvous.tell("one", {"x": 1}) == [[{"x": 1}]]
    rendezvous.close()


def test_a_site_that_does_not_come_is_named() -> None:
    with pytest.raises(LaunchError, match=r"site 1 did not join the start within"):
        SiteRendezvous.join(section(0, free_port(), 0.3), ALONE, {})


def test_a_rendezvous_that_nobody_serves_is_named() -> None:
    port = free_port()
    with pytest.raises(LaunchError, match=rf"127.0.0.1:{port} cannot be reached from"):
        SiteRendezvous.join(section(1, port, 0.3), ALONE, {})


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} of .* cannot be used"):
            SiteRendezvous.join(section(0, port, 5.0), ALONE, {})


def test_a_site_that_trains_already_is_not_started_again() -> None:
    def act(index: int, rendezvous: SiteRendezvous) -> str | None:
        if index == 0:
            return None
        again = section(1, rendezvous.sites.port)
        with pytest.raises(LaunchError) as caught:
            SiteRendezvous.join(again, ALONE, {})
        return str(caught.value)

    assert str(met(act)[1]).startswith("site 1 trains already, at 127.0.0.1:")


def roll_call(rendezvous: SiteRendezvous) -> Any:
    assert rendezvous.roll_call is not None
    return rendezvous.roll_call


def ended(rendezvous: SiteRendezvous) -> None:
    """As if its process had ended."""
    roll_call(rendezvous).end()
    roll_call(rendezvous).door.store = None


@pytest.mark.parametrize("lost", [0, 1])
def test_a_site_that_is_started_again_comes_to_those_that_train(lost: int) -> None:
    """Where the one at sites.address was lost, too: it is found by the doors known from before."""
    port = free_port()

    def join(index: int) -> SiteRendezvous:
        return SiteRendezvous.join(section(index, port), ALONE, {"a": 1})

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(join, range(2)))
    ended(both[lost])
    other = both[1 - lost]
    own = Presence(1 - lost, 0, 5, 0, 1, "x", 0)
    alone = roll_call(other).gather(own)
    assert alone.sites == (1 - lost,)
    assert roll_call(other).decide(alone, is_done=True)
    known = Known(is_new=False, places=roll_call(other).places)
    again = SiteRendezvous.join(section(lost, port), ALONE, {"a": 1}, known)
    assert again.members == (lost,)
    assert roll_call(again).leader == 1 - lost
    ended(again)
    with pytest.raises(LaunchError, match=r"a: 1 at site .*, 2 at site|a: 2 at site .*, 1 at site"):
        SiteRendezvous.join(section(lost, port), ALONE, {"a": 2}, known)
    roll_call(other).leave()


def test_a_resumed_site_begins_by_itself_where_nobody_comes() -> None:
    port = free_port()
    alone = SiteRendezvous.join(section(1, port, 0.3), ALONE, {}, Known(is_new=False))
    assert alone.members == (1,)
    assert alone.tell("one", 1) == [[1]]
    ended(alone)


def test_what_is_not_of_a_site_is_refused() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        stranger = Door.served("127.0.0.1", port)
        stranger.store.set("started", "\x80 no JSON")
        found = threads.submit(SiteRendezvous.join, section(1, port, 3.0), ALONE, {})
        with pytest.raises(LaunchError, match="was not written by a site of this version"):
            found.result()


def test_nothing_that_is_equal_is_refused() -> None:
    refuse_differences({0: {"a": [1, 2]}, 1: {"a": [1, 2]}})
