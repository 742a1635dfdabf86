"""What hosts hold and need of checkpoints in memory, combined along a tree: it stays small, and
which files go from where."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from bigtrain.engine.checkpoint.tensor_file import file_name
from bigtrain.run.checkpointing.memory_files import (
    _add_holders,
    _add_holdings,
    _add_needs,
    _Holdings,
    _joined,
    _Needs,
    _NeedsOfHosts,
    plan_transfers,
)


def test_holdings_of_all_hosts_are_one_range() -> None:
    num_hosts, each = 16, 8
    of_hosts = []
    for host in range(num_hosts):
        own = [(each * h, each * (h + 1)) for h in (host, (host - 1) % num_hosts)]
        holdings = _Holdings("run", "attempt", num_hosts * each, each * host, 1, _joined(own))
        of_hosts.append({(7, "digest"): holdings})
    random.Random(0).shuffle(of_hosts)
    everything: dict[tuple[int, str], _Holdings] = {}
    for one in deepcopy(of_hosts):
        everything = _add_holdings(everything, one)
    [joined_holdings] = everything.values()
    assert joined_holdings.ranges == [(0, num_hosts * each)]
    assert (joined_holdings.first, joined_holdings.num_hosts, joined_holdings.missing()) == (
        0,
        num_hosts,
        [],
    )
    lost = [one for one in of_hosts if one[7, "digest"].first not in (8, 16)]
    everything = {}
    for one in lost:
        everything = _add_holdings(everything, one)
    [joined_holdings] = everything.values()
    # Host 1 is lost with its partner: host 2 had the copies of its files.
    assert joined_holdings.missing() == [file_name(rank) for rank in range(8, 16)]


@pytest.mark.parametrize("seed", range(5))
def test_needs_are_what_hosts_lack_in_any_order(seed: int) -> None:
    chooser = random.Random(seed)
    hosts = [chooser.choice("abc") for _ in range(12)]
    keepers = [hosts.index(host) for host in hosts]
    held = {keeper: {f"f{n}" for n in range(0, 12, 2)} - {f"f{keeper}"} for keeper in keepers}
    wanted = [{f"f{chooser.randrange(12)}"} for _ in hosts]
    ranks: list[_NeedsOfHosts] = []
    for rank, keeper in enumerate(keepers):
        here = held[keeper] if keeper == rank else set()
        needs = _Needs(1, hosts.count(hosts[rank]) - 1, set(wanted[rank]), set(here))
        ranks.append(_add_needs({}, {keeper: needs}))
    while len(ranks) > 1:
        at = chooser.randrange(len(ranks) - 1)
        ranks[at : at + 2] = [_add_needs(ranks[at], ranks[at + 1])]
    expected = {
        keeper: set().union(*(wanted[r] for r, k in enumerate(keepers) if k == keeper)) - files
        for keeper, files in held.items()
    }
    wanted_by_keeper = {keeper: needs.wanted for keeper, needs in ranks[0].items()}
    assert wanted_by_keeper == {keeper: files for keeper, files in expected.items() if files}


def test_who_holds_most_copies_does_not_send_all() -> None:
    needs = {8: {"a", "b", "c"}, 16: {"a"}}
    plan = plan_transfers(needs, {"a": {0: 5, 4: 5}, "b": {0: 5, 4: 5}, "c": {4: 5}})
    assert [(one.path, one.source, one.target) for one in plan] == [
        ("a", 0, 8), ("b", 4, 8), ("c", 4, 8), ("a", 0, 16),
    ]  # fmt: skip
    assert plan_transfers({8: {"nobody has it"}}, {}) == []


def test_no_more_holders_are_told_than_hosts_that_lack_a_file() -> None:
    lacking = {"a": 2, "b": 1}
    holders: dict[str, dict[int, int]] = {}
    for keeper in (24, 8, 0, 16):
        holders = _add_holders(lacking, holders, {"a": {keeper: 5}, "b": {keeper: 6}})
    assert holders == {"a": {0: 5, 8: 5}, "b": {0: 6}}
