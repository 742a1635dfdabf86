"""Values come to rank 0 in order, and the largest to all, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import maximum_of_all
from tests.support.lives import run_script


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [(1, "at once"), pytest.param(3, "at once", marks=pytest.mark.slow), (5, "lazy")],
)
def test_values_go_up_and_down(tmp_path: Path, num_ranks: int, how: str) -> None:
    run_script(num_ranks, Path(__file__).with_name("trees_worker.py"), tmp_path, how)
    assert len(list(tmp_path.glob("*.done"))) == num_ranks


@pytest.mark.parametrize("rank", [0, 1, 2048, 4095])
def test_of_4096_ranks_none_waits_for_more_than_a_few(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talked: list[int] = []
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4096)
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(dist, "send", lambda values, dst, group: talked.append(dst))
    monkeypatch.setattr(dist, "recv", lambda values, src, group: talked.append(src))
    monkeypatch.setattr(dist, "broadcast", lambda values, src, group: None)
    maximum_of_all(torch.zeros(2), None)  # type: ignore[arg-type]
    assert len(talked) == {0: 12, 1: 1, 2048: 12, 4095: 1}[rank]
    assert len(set(talked)) == len(talked)
