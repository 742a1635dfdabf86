"""Members of the direct exchange at a real server: rounds, votes, refusals, gloo's handshake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.errors import LaunchError, TrainingError
from bigtrain.models.torch_patches import gloo_group
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites import membership
from bigtrain.sites.client import DetachedError
from bigtrain.sites.codecs import CODECS
from bigtrain.sites.exchange import SiteGroup
from bigtrain.sites.membership import Membership, ServerStore
from bigtrain.sites.protocol import RoundPlan, digest_of
from tests.support.outer_servers import outer_server
from tests.support.worlds import free_port

LAYOUT = b'{"ranks": []}'
WINDOW = 1.0


@pytest.fixture
def reach(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with outer_server(tmp_path / "server", window_seconds=WINDOW) as settings:
        yield settings


def member(
    reach: dict[str, Any], index: int, *, seconds: float = 20.0, count: int = 2
) -> Membership:
    sites = SitesSection.model_validate(
        {
            "count": count,
            "index": index,
            "inner_steps": 1,
            "exchange": "direct",
            "timeout_seconds": seconds,
            **reach,
        }
    )
    return Membership(sites, f"{index:032x}")


def join(site: Membership, **facts: Any) -> None:
    sites = {"count": site.sites.count, "outer": {"type": "average"}, "codec": "float32"}
    header = {"facts": facts, "sites": sites, "parameters": [["w", [4]]], "is_new": True}
    if site.join({**header, "layout": digest_of(LAYOUT)})["needs_layout"]:
        site.ask("layout", {}, payload=LAYOUT)


def entry(number: int, fragment: int | None = 0, **more: Any) -> dict[str, Any]:
    tokens = 0 if fragment is None else 10
    return {
        "number": number,
        "step": 5 * number,
        "last_step": 1000,
        "fragment": fragment,
        "is_last": False,
        "tokens": tokens,
        "digest": f"{number:016x}",
        "tokens_seen": 20 * number,
        **more,
    }


def together(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result() for future in [threads.submit(work) for work in works]]


def begun(reach: dict[str, Any], **more: Any) -> tuple[Membership, Membership]:
    """Two sites after the round of a new run."""
    first, second = member(reach, 0, **more), member(reach, 1, **more)
    join(first)
    join(second)

    def begin(site: Membership) -> None:
        plan = site.enter(entry(0, None))
        assert (plan.members, plan.number, plan.takers) == ((0, 1), 0, ())
        assert site.commit(plan.attempt, is_done=True, unusable=None)

    together(lambda: begin(first), lambda: begin(second))
    return first, second


def test_a_round_counts_if_all_vote_for_it_and_is_repeated_otherwise(reach: dict[str, Any]) -> None:
    sites = begun(reach)

    def round_(site: Membership, number: int, *, is_done: bool) -> tuple[RoundPlan, bool]:
        plan = site.enter(entry(number))
        return plan, site.commit(plan.attempt, is_done=is_done, unusable=None)

    failed = together(
        lambda: round_(sites[0], 0, is_done=True), lambda: round_(sites[1], 0, is_done=False)
    )
    assert [committed for _, committed in failed] == [False, False]
    made = together(*(lambda site=site: round_(site, 0, is_done=True) for site in sites))
    assert [committed for _, committed in made] == [True, True]
    plan = made[0][0]
    assert (plan.number, plan.sites, plan.weights, plan.tokens_seen) == (1, (0, 1), (1, 1), 20)
    # The groups of a round that failed are broken: the next one has others.
    assert plan.generation != failed[0][0].generation
    # A verdict stays.
    assert sites[0].commit(plan.attempt, is_done=True, unusable=None)
    assert not sites[0].commit(failed[0][0].attempt, is_done=True, unusable=None)
    for site in sites:
        assert site.leave() == ""


@pytest.mark.slow
def test_a_site_that_does_not_join_a_new_run_is_named(reach: dict[str, Any]) -> None:
    site = member(reach, 0, seconds=WINDOW + 0.5)
    join(site)
    with pytest.raises(LaunchError, match=r"^site 1 did not join the start within"):
        site.enter(entry(0, None))
    site.leave()


def test_other_facts_and_a_second_run_with_one_index_are_refused(reach: dict[str, Any]) -> None:
    site = member(reach, 0)
    join(site, lr=1)
    with pytest.raises(LaunchError, match=r"lr: 1 there, 2 here"):
        join(member(reach, 1), lr=2)
    other = Membership(site.sites, "f" * 32)
    with pytest.raises(LaunchError, match=r"another run directory .* takes part as this site"):
        join(other, lr=1)
    site.leave()


@pytest.mark.slow
def test_other_settings_are_refused_before_a_model_is_built(
    reach: dict[str, Any], tmp_path: Path
) -> None:
    """By a site that has joined, and by one that is about to; the sites of a new run are told."""
    first, second = member(reach, 0, seconds=WINDOW + 0.5), member(reach, 1)
    second.compare({"lr": 2}, [])
    with pytest.raises(LaunchError, match="lr: 2 there, 1 here"):
        first.compare({"lr": 1}, [])
    second.compare({"lr": 3}, [])  # started again
    with pytest.raises(LaunchError, match="lr: 3 there, 1 here"):
        first.compare({"lr": 1}, [])
    header = {"facts": {"lr": 1}, "parameters": [["w", [4]]], "layout": digest_of(LAYOUT)}
    first.join(header)
    first.ask("layout", {}, payload=LAYOUT)
    with pytest.raises(LaunchError, match="lr: 1 there, 2 here"):
        second.compare({"lr": 2}, [])
    with pytest.raises(LaunchError, match=r"site 1 was refused: .*; lr: 1 there, 2 here -> see"):
        first.enter(entry(0, None))
    log = (tmp_path / "server" / "server.log").read_text()
    assert "refused join of site 1: the server's run has other settings" in log
    second.compare({"lr": 1}, [])
    second.compare({"lr": 2}, ["lr"])
    second.join({**header, "facts": {"lr": 1}})  # what was only asked about has changed nothing
    for site in (first, second):
        site.leave()


def test_a_site_with_values_that_none_can_use_ends(reach: dict[str, Any]) -> None:
    sites = begun(reach)

    def blames(site: Membership, unusable: int | None) -> bool:
        plan = site.enter(entry(0))
        return site.commit(plan.attempt, is_done=unusable is None, unusable=unusable)

    assert together(lambda: blames(sites[0], 1), lambda: blames(sites[1], None)) == [False, False]
    with pytest.raises(TrainingError, match="the outer server refuses site 1: site 1 sent values"):
        sites[1].enter(entry(0))
    plan = sites[0].enter(entry(0))
    assert plan.members == (0,)


@pytest.mark.slow
def test_a_server_that_cannot_be_reached_detaches_the_site(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"0" * 32)
    reach = {
        "server": f"http://127.0.0.1:{free_port()}",
        "token_file": str(tmp_path / "token"),
    }
    site = member(reach, 0, seconds=0.5)
    with pytest.raises(DetachedError, match="did not answer in time"):
        site.enter(entry(1))
    assert "could not notify the server that this site is leaving" in site.leave()


def test_a_server_that_is_not_up_yet_is_not_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_COMPARE_SECONDS", 0.2)
    (tmp_path / "token").write_bytes(b"0" * 32)
    reach = {"server": f"http://127.0.0.1:{free_port()}", "token_file": str(tmp_path / "token")}
    member(reach, 0).compare({}, [])


def test_gloo_connects_by_the_store_of_the_server(reach: dict[str, Any]) -> None:
    count = 3
    members = [member(reach, index, count=count) for index in range(count)]
    for site in members:
        join(site)

    def of_site(index: int) -> torch.Tensor:
        site = members[index]
        plan = site.enter(entry(0, None))
        store = ServerStore(site, plan.generation, "0-0")
        address = site.own_address()
        group = gloo_group(store, index, count, timedelta(seconds=20), address)
        local = torch.full((10,), float(index))
        mean = SiteGroup(group, [1] * count).mean(CODECS["float32"], local, torch.zeros(10))
        assert site.commit(plan.attempt, is_done=True, unusable=None)
        return mean

    for site_mean in together(*(lambda index=index: of_site(index) for index in range(count))):
        assert torch.equal(site_mean, torch.full((10,), sum(range(count)) / count))


def test_a_handshake_ends_when_another_member_votes_against_the_round(
    reach: dict[str, Any],
) -> None:
    sites = begun(reach)

    def opens(site: Membership) -> str:
        plan = site.enter(entry(0))
        store = ServerStore(site, plan.generation, "0-0")
        try:
            gloo_group(store, 0, 2, timedelta(seconds=20), site.own_address())
        except (RuntimeError, DetachedError) as error:
            assert not site.commit(plan.attempt, is_done=False, unusable=None)
            return str(error)
        return ""

    def refuses(site: Membership) -> bool:
        plan = site.enter(entry(0))
        return site.commit(plan.attempt, is_done=False, unusable=None)

    reason, _ = together(lambda: opens(sites[0]), lambda: refuses(sites[1]))
    assert "the round of this generation is over" in reason
