"""What several processes hold is written by one of them, and each writes its share."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.engine.checkpoint.tensor_files import find_parts
from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import arguments, complete, losses
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def test_replicas_are_divided(server: Server, run_yaml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = arguments(run_yaml, run, "--deepspeed_config", "zero0", "train.steps=4")
    complete(server, words)
    tensors = checkpoints.find(run, 4) / checkpoints.TENSORS
    parts = find_parts(tensors)
    assert parts.keys() == read_full(tensors).keys()
    assert all(
        len(parts_of_tensor) == 1 for parts_of_tensor in parts.values()
    )  # whole tensors, each of them once
    sizes = [path.stat().st_size for path in tensors.iterdir()]
    assert max(sizes) < 0.6 * sum(sizes)
    assert sorted(losses(run)) == [1, 2, 3, 4]
