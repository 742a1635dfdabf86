"""Sites that meet, in threads: what is compared, and what is said of one that is not there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bigtrain.engine.sites.site_rendezvous import Facts, SiteRendezvous, refuse_differences
from bigtrain.errors import LaunchError
from bigtrain.settings.sections.sites import SitesSection
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


def test_facts_are_told_to_all_sites_and_forgotten_later() -> None:
    def act(index: int, rendezvous: SiteRendezvous) -> Any:
        found = rendezvous.tell("one", {"index": index})
        before = rendezvous._store.num_keys() if index == 0 else 0
        for name in ("two", "three", "four", "five"):
            rendezvous.compare(name, {(0, 0): {"same": True}})
        if index == 0:
            assert rendezvous._store.num_keys() <= before + 4
        return found

    assert met(act) == [[[{"index": 0}], [{"index": 1}]]] * 2


def test_each_group_of_ranks_compares_its_own_facts() -> None:
    """A rank of a site meets several of another, which know only what they share with it."""

    def act(index: int, rendezvous: SiteRendezvous) -> Any:
        rendezvous.compare("alike", {(0, 0): {"x": 1}})
        rendezvous.compare("other", {(0, 0): {"x": index}})

    found = met(act)
    assert found[0] == found[1]
    assert "\n  x: 0 at site 0, 1 at site 1" in found[0]


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
    rendezvous.compare("two", {(0,): {"x": 1}})
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


def test_a_site_that_was_there_before_is_refused() -> None:
    port_of: dict[str, int] = {}

    def act(index: int, rendezvous: SiteRendezvous) -> str | None:
        if index == 1:
            again = section(1, rendezvous.sites.port)
            port_of["port"] = again.port
            with pytest.raises(LaunchError) as caught:
                SiteRendezvous.join(again, ALONE, {})
            return str(caught.value)
        return None

    found = met(act)
    assert found[1].startswith(f"site 1 has joined the rendezvous at 127.0.0.1:{port_of['port']}")


def test_what_is_not_of_a_site_is_refused() -> None:
    def act(index: int, rendezvous: SiteRendezvous) -> None:
        if index == 0:
            rendezvous._store.set("rank/0/noise/0", "\x80 no JSON")
            rendezvous._store.set("rank/0/noise/1", "[1, 2")
            rendezvous._read("rank/0/noise", "noise")

    assert "was not written by a site of this version of bigtrain" in met(act)[0]


def test_nothing_that_is_equal_is_refused() -> None:
    refuse_differences([{"a": [1, 2]}, {"a": [1, 2]}])
