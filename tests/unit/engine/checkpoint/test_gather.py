"""Values come to rank 0 in order, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lives import run_script


@pytest.mark.distributed
@pytest.mark.parametrize(("num_ranks", "how"), [(1, "at once"), (3, "at once"), (5, "lazy")])
def test_values_are_gathered(tmp_path: Path, num_ranks: int, how: str) -> None:
    run_script(num_ranks, Path(__file__).with_name("gather_worker.py"), tmp_path, how)
    assert len(list(tmp_path.glob("*.done"))) == num_ranks
