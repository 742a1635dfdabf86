"""Matrices come together whole, each at one owner, and go back to where their parts lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.engine.optimizers.matrix_exchange import assign
from tests.support.lives import run_script


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_ranks", "round_elements"),
    [(1, 50), (3, 50), pytest.param(3, 1 << 25, marks=pytest.mark.slow)],
)
def test_every_element_comes_and_goes_once(
    tmp_path: Path, num_ranks: int, round_elements: int
) -> None:
    worker = Path(__file__).with_name("exchange_worker.py")
    run_script(num_ranks, worker, tmp_path, str(round_elements))
    assert len(list(tmp_path.glob("*.done"))) == num_ranks


def test_work_is_balanced() -> None:
    costs = {number: cost for number, cost in enumerate([9, 1, 1, 4, 4, 1, 9, 1])}
    owners = assign(costs, 3)
    loads = [sum(costs[n] for n, owner in owners.items() if owner == rank) for rank in range(3)]
    assert sorted(loads) == [10, 10, 10]
