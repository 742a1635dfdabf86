"""Process groups hold the processes that the topology says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lives import run_script


@pytest.mark.distributed
def test_groups_of_four_processes(tmp_path: Path) -> None:
    run_script(4, Path(__file__).with_name("mesh_worker.py"), tmp_path)
    assert len(list(tmp_path.glob("*.done"))) == 4
