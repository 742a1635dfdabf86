"""How often ranks ask the store while they wait."""

from __future__ import annotations

from itertools import islice

import pytest

from bigtrain.engine.startup.long_work import _pauses


@pytest.mark.parametrize(
    ("num_ranks", "first", "longest"),
    [(2, 0.001, 0.5), (64, 0.001, 0.5), (2048, 0.03125, 0.5), (4096, 0.0625, 1), (16384, 0.25, 4)],
)
def test_pauses_grow_with_the_ranks(num_ranks: int, first: float, longest: float) -> None:
    one, other = (list(islice(_pauses(num_ranks), 30)) for _ in range(2))
    assert one != other  # not all ranks at the same instants
    for number, pause in enumerate(one):
        usual = min(first * 2**number, longest)
        assert 0.75 * usual <= pause <= 1.25 * usual
