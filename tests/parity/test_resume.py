"""Stopped and gone on, on the same topology and on others: the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint_io import read_full
from tests.parity.conftest import llama, run_config, train_cases

# The whole matrix is trained in the first test's set-up: minutes on two busy cores.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = 5, 10
WRITERS = [(1, "zero0"), (2, "zero1"), (2, "zero2"), (2, "zero3"), (2, "zero3_offload")]
READERS = [(1, "zero0"), (1, "zero3"), (2, "zero0"), (2, "zero1"), (2, "zero2_offload")]
READERS += [(2, "zero3")]
BFLOAT16 = [(1, "zero0"), (2, "zero1"), (2, "zero2"), (2, "zero3")]


def case(
    data: Path, world_size: int, deepspeed_config: str, dtype: str, **steps: Any
) -> dict[str, Any]:
    model = {"config": llama(attention_dropout=0.1, tie_word_embeddings=dtype == "float32")}
    config = run_config(data, model, micro_samples=8 // world_size, precision={"dtype": dtype})
    return {"config": config, "deepspeed_config": deepspeed_config, **steps}


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Uninterrupted runs that save at STOP, then every reader on every writer's checkpoint."""
    root = tmp_path_factory.mktemp("resume")
    found: dict[str, Any] = {}
    writers = [(*w, "float32") for w in WRITERS] + [(*w, "bfloat16") for w in BFLOAT16]
    for world_size in (1, 2):
        cases = {
            f"write-{size}-{name}-{dtype}": case(
                dataset,
                size,
                name,
                dtype,
                last_step=END,
                save_at=STOP,
                save_to=str(root / f"{size}-{name}-{dtype}"),
            )
            for size, name, dtype in writers
            if size == world_size
        }
        found.update(train_cases(world_size, cases, tmp_path_factory.mktemp("write")))
    for world_size in (1, 2):
        cases = {}
        for wrote in writers:
            readers = [(*r, "float32") for r in READERS] if wrote[2] == "float32" else [wrote]
            for read in {*readers, wrote}:
                if read[0] != world_size:
                    continue
                name = "-".join(map(str, (*wrote, "to", *read)))
                cases[name] = case(
                    dataset,
                    *read,
                    first_step=STOP,
                    last_step=END,
                    restore_from=str(root / "-".join(map(str, wrote))),
                    save_again_to=str(root / "again" / name),
                )
        found.update(train_cases(world_size, cases, tmp_path_factory.mktemp("read")))
    (root / "results.json").write_text(json.dumps(found))
    return root, found


def pairs() -> list[tuple[tuple[int, str, str], tuple[int, str, str]]]:
    found = []
    for wrote in WRITERS:
        for read in sorted({*READERS, wrote}):
            found.append(((*wrote, "float32"), (*read, "float32")))
    return found + [((*w, "bfloat16"), (*w, "bfloat16")) for w in BFLOAT16]


@pytest.mark.parametrize(("wrote", "read"), pairs(), ids=str)
def test_goes_on(
    wrote: tuple[int, str, str],
    read: tuple[int, str, str],
    runs: tuple[Path, dict[str, Any]],
) -> None:
    root, found = runs
    name = "-".join(map(str, (*wrote, "to", *read)))
    uninterrupted = found["write-" + "-".join(map(str, wrote))]
    resumed = found[name]
    if wrote == read:
        assert resumed["losses"] == uninterrupted["losses"][STOP:]
        assert resumed["norms"] == uninterrupted["norms"][STOP:]
    saved = read_full(root / "-".join(map(str, wrote)) / "tensors")
    again = read_full(root / "again" / name / "tensors")
    assert saved.keys() == again.keys()
    assert any(key.startswith("exp_avg_sq/") for key in saved)
    for key, tensor in saved.items():
        assert torch.equal(tensor, again[key]), key
