"""What hosts hold and need of checkpoints in memory, combined along a tree: it stays small, and
which files go from where."""

from __future__ import annotations

import itertools
import random
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigtrain.engine.checkpoint.tensor_file import file_name
from bigtrain.run.checkpointing import checkpoints, memory_files, resume
from bigtrain.run.checkpointing.memory_directory import StoredInMemory, stored_at
from bigtrain.run.checkpointing.memory_files import (
    MemoryCheckpoint,
    MemoryFiles,
    _add_holders,
    _add_holdings,
    _add_needs,
    _files_at,
    _Holdings,
    _joined_ranges,
    _Needs,
    _NeedsOfHosts,
    plan_transfers,
)
from tests.support.run_trees import run_tree
from tests.support.small_checkpoint import write_small_checkpoint

SMALL_RUN = run_tree(model={"path": "base"})


def test_holdings_of_all_hosts_are_one_range() -> None:
    num_hosts, each = 16, 8
    of_hosts = []
    for host in range(num_hosts):
        own = [(each * h, each * (h + 1)) for h in (host, (host - 1) % num_hosts)]
        holdings = _Holdings(
            "run", "attempt", num_hosts * each, each * host, 1, _joined_ranges(own)
        )
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


@pytest.mark.parametrize("seed", range(3))
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
    wanted_by_keeper = {keeper: needs.needed for keeper, needs in ranks[0].items()}
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


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "order"),
    [
        ((9, 7), (6, 3), ("memory 9", "memory 7", "disk 6", "disk 3")),
        ((5,), (8, 3), ("disk 8", "memory 5", "disk 3")),
        ((8, 4), (8, 6), ("memory 8", "disk 8", "disk 6", "memory 4")),
        ((2,), (), ("memory 2",)),
    ],
)
def test_a_run_resumes_from_the_newest_of_memory_and_disk(
    in_memory: tuple[int, ...],
    on_disk: tuple[int, ...],
    order: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "list_steps", lambda _: sorted(on_disk))
    usable = [(Path("disk"), {"step": step}) for step in on_disk]
    monkeypatch.setattr(resume, "_usable_on_disk", lambda *_: iter(usable))
    context: Any = SimpleNamespace(directory=Path("run"))
    stored = [MemoryCheckpoint(step, "digest", 0) for step in in_memory]
    candidates = resume._newest_first(context, stored)
    shown = [
        f"memory {one.step}" if isinstance(one, MemoryCheckpoint) else f"disk {one[1]['step']}"
        for one in itertools.islice(candidates, len(order))
    ]
    assert tuple(shown) == order


@pytest.mark.parametrize(
    ("run", "attempt", "step", "files", "told"),
    [
        ("this", "second", 9, 2, None),
        ("this", "first", 5, 2, None),
        ("this", "first", 6, 2, "the run has continued from an earlier step since"),
        ("other", "second", 9, 2, "the run has continued from an earlier step since"),
        ("this", "unknown", 5, 2, "the run has continued from an earlier step since"),
        ("this", "second", 9, 1, "no remaining host has rank-00001.safetensors"),
    ],
    ids=["newest", "earlier", "trained again", "other run", "other launch", "incomplete"],
)
def test_a_stale_checkpoint_in_memory_is_not_used(
    run: str,
    attempt: str,
    step: int,
    files: int,
    told: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first launch trained on from step 5; the second one continued from there."""
    monkeypatch.setattr(memory_files, "combine_on_main", lambda own, *_: own)
    monkeypatch.setattr(checkpoints, "read_run_id", lambda _: "this")
    newest = {"first": 5.0, "second": float("inf")}
    monkeypatch.setattr(memory_files, "steps_of_attempts", lambda _: newest)
    names = frozenset(map(file_name, range(files)))
    stored = [StoredInMemory(step, run, attempt, "digest", 2, names)]
    lines: list[str] = []
    held: Any = SimpleNamespace(
        directory=SimpleNamespace(stored=lambda: stored),
        is_keeper=True,
        group=None,
        _keeper=0,
        _context=SimpleNamespace(
            directory=tmp_path, hosts=["host"], log=SimpleNamespace(info=lines.append)
        ),
    )
    complete = MemoryFiles.complete(held)
    assert [one.step for one in complete] == ([step] if told is None else [])
    assert all(told in line for line in lines) if told else not lines
    assert len(lines) == bool(told)


def test_files_of_another_checkpoint_of_the_same_step_are_not_used(tmp_path: Path) -> None:
    directory = write_small_checkpoint(tmp_path, 3, SMALL_RUN)
    (directory / checkpoints.LAYOUT).write_text("{}")
    digest = stored_at(directory).digest
    assert "tensors/rank-00000.safetensors" in _files_at(directory, digest)
    assert _files_at(directory, digest[::-1]) == {}
