"""Who lags, by where all processes are; and the marks that say where."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bigtrain.run.diagnostics.stragglers import find_stragglers
from bigtrain.run.health.heartbeat import Heartbeat, Transfers
from bigtrain.run.health.status_store import (
    Diagnosis,
    Position,
    StatusStore,
    StoreLocation,
    diagnose,
    diagnose_alone,
)
from bigtrain.system.world import World
from tests.support.worlds import free_port

HOSTS = ["n0", "n0", "n1", "n1"]


def position(rank: int, **changes: Any) -> Position:
    place: dict[str, Any] = {
        "rank": rank,
        "host": HOSTS[rank],
        "pid": 100 + rank,
        "step": 7,
        "activity": "backward pass",
        "module": None,
        "collective": "all_reduce",
    }
    return Position(**(place | changes))


def verdict(*positions: Position) -> Diagnosis:
    return diagnose({p.rank: p for p in positions}, {}, HOSTS[: len(positions)])


def test_a_process_outside_of_the_collective_lags() -> None:
    asleep = position(2, collective=None, activity="forward pass", module="model.layers.3")
    diagnosis = verdict(position(0), position(1), asleep, position(3))
    assert diagnosis.ranks == (2,)
    assert diagnosis.text.splitlines()[:4] == [
        "lagging:",
        "  rank 2 on n1 (process 102): step 7, forward pass, model.layers.3, outside of "
        "collectives (the others wait for it in a collective)",
        "waiting:",
        "  rank 0 on n0 (process 100): step 7, backward pass, in all_reduce",
    ]


def test_a_process_that_does_not_answer_comes_first() -> None:
    answers = {0: position(0, collective=None), 1: position(1), 3: position(3)}
    diagnosis = diagnose(answers, {2: position(2, module="model.layers.1")}, HOSTS)
    assert diagnosis.ranks == (2,)
    assert diagnosis.text.splitlines()[1] == (
        "  rank 2 on n1 does not respond: it was last in step 7, backward pass, model.layers.1"
    )
    assert "rank 2 on n1 does not respond: never did" in diagnose(answers, {}, HOSTS).text


def test_an_earlier_step_then_another_collective() -> None:
    others = [position(0), position(1), position(2)]
    assert verdict(*others, position(3, step=6)).ranks == (3,)
    assert verdict(*others, position(3, collective="broadcast")).ranks == (3,)
    alike = verdict(*others, position(3))
    assert alike.ranks == ()
    assert "all ranks are at the same position" in alike.text


def test_one_rank_and_one_that_reaches_nobody() -> None:
    assert verdict(position(0, collective=None)).ranks == (0,)
    alone = diagnose_alone(position(3), HOSTS)
    assert alone.ranks == (0,)
    assert "rank 0 on n0 or its store does not respond: ranks cannot" in alone.text
    first = diagnose_alone(position(0), HOSTS)
    assert first.ranks == ()
    assert "the launcher's store does not respond" in first.text


def test_a_thousand_that_wait_are_not_all_listed() -> None:
    hosts = ["n"] * 1000
    answers = {rank: Position(rank, "n", 1, 1, "x", None, "all_reduce") for rank in range(999)}
    text = diagnose(answers, {}, hosts).text
    assert len(text.splitlines()) == 20
    assert text.endswith("and 983 more")


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)])[0] for _ in range(2))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tensor = layer(tensor)
        return tensor


def test_marks_of_layers_in_both_passes_change_no_number() -> None:
    torch.manual_seed(0)
    model, beat = Layered(), Heartbeat()
    example = torch.ones(1, 2)
    model(example).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    seen: list[tuple[str, str | None]] = []
    beat._enter = lambda *place: seen.append(place)  # type: ignore[method-assign]
    beat.watch_layers(model)
    model(example).sum().backward()
    assert seen == [
        ("forward pass", "layers.0"),
        ("forward pass", "layers.1"),
        ("backward pass", "layers.1"),
        ("backward pass", "layers.0"),
    ]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_the_first_step_of_a_process_may_take_long() -> None:
    beat = Heartbeat()
    assert beat.slow
    beat.begin_step(501)
    assert beat.slow
    beat.begin_step(502)
    assert not beat.slow
    beat.set_activity("saving", slow=True)
    assert beat.slow
    assert beat.count == 3


def test_large_files_are_progress(tmp_path: Path) -> None:
    transfers = Transfers()
    assert not transfers.made_progress()
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    assert transfers.made_progress()
    assert not transfers.made_progress()
    (tmp_path / "log").write_text("a line")
    assert not transfers.made_progress()
    (tmp_path / "weights").read_bytes()
    assert transfers.made_progress()


def test_thousands_of_ranks_are_read_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    place, size = StoreLocation("127.0.0.1", port, "token"), 4096
    place.create_entries(size)
    ranks = [StatusStore(place, World(rank, size, 0)) for rank in (0, 4095)]
    calls = []
    for name in ("get", "check", "multi_get"):
        method = getattr(dist.PrefixStore, name)
        monkeypatch.setattr(
            dist.PrefixStore,
            name,
            lambda self, keys, name=name, method=method: calls.append(name) or method(self, keys),
        )
    ranks[1].report(position(1), moved=False, is_slow=False)
    assert ranks[0].last_known() == {4095: position(1)}
    ranks[0].answer(position(0))
    assert ranks[1].answers(0.0) == {0: position(0)}
    assert set(calls) == {"multi_get"}
    for rank in ranks:
        rank.close()
    del store


def test_a_board_is_found_again_after_its_store_was_away() -> None:
    port = free_port()
    serve = partial(dist.TCPStore, "127.0.0.1", port, is_master=True, wait_for_workers=False)
    store = serve()
    status_store = StatusStore(StoreLocation("127.0.0.1", port, "token"), World(0, 1, 0))
    status_store.report(position(0), moved=True, is_slow=False)
    assert status_store.moves() == 1
    assert status_store.last_known() == {0: position(0)}
    del store
    assert status_store.moves() is None
    assert status_store.is_lost
    assert status_store.last_known() == {}
    store = serve()
    again = status_store.reopened()
    assert again is not None
    assert again.moves() == 0
    again.close()
    status_store.close()
    del store


def test_stragglers_are_compared_with_their_own_kind() -> None:
    assert find_stragglers([1.0, 1.1, 1.0, 2.0], [0, 0, 0, 0], 3.0, 1.5)[0].rank == 3
    assert find_stragglers([1.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], 3.0, 1.5) == []
    # Slow by half, of something that hardly counts.
    assert find_stragglers([0.001, 0.002], [0, 0], 3.0, 1.5) == []
    assert find_stragglers([1.0], [0], 3.0, 1.5) == []
    (one,) = find_stragglers([1.0, 4.0], [0, 0], 5.0, 1.5)
    assert (one.rank, one.work_seconds, one.median_seconds) == (1, 4.0, 1.0)


def test_of_thousands_each_is_compared_with_the_median_of_the_others() -> None:
    generator = Random(3)
    for size in (2, 3, 4, 5, 64):
        work = [generator.choice([1.0, 1.0, 1.5, 2.0, 9.0]) for _ in range(size)]
        peers = [rank % 2 for rank in range(size)]
        expected = []
        for rank, seconds in enumerate(work):
            others = [work[r] for r in range(size) if r != rank and peers[r] == peers[rank]]
            if others and seconds > 1.2 * median(others) and seconds - median(others) > 0.1:
                expected.append((rank, seconds, median(others)))
        stragglers = find_stragglers(work, peers, 1.0, 1.2)
        assert [(one.rank, one.work_seconds, one.median_seconds) for one in stragglers] == expected
