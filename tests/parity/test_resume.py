"""Stopped and gone on, on the same topology and on others: the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from tests.parity.conftest import STEPS, llama, run_config, train_cases

# The whole matrix is trained in the first test's set-up: minutes on two busy cores.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = STEPS // 4 + 1, STEPS // 2 + 1
WRITERS = [(1, "zero0"), (2, "zero1"), (2, "zero2"), (2, "zero3"), (2, "zero3_offload")]
READERS = [(1, "zero0"), (1, "zero3"), (2, "zero0"), (2, "zero1"), (2, "zero2_offload")]
READERS += [(2, "zero3")]
BFLOAT16 = [(1, "zero0"), (2, "zero1"), (2, "zero2"), (2, "zero3")]


def case(
    data: Path, world_size: int, deepspeed_config: str, dtype: str, **steps: Any
) -> dict[str, Any]:
    model = {"config": llama(attention_dropout=0.1, tie_word_embeddings=dtype == "float32")}
    config = run_config(data, model, micro_batch_size=8 // world_size, precision={"dtype": dtype})
    return {"config": config, "deepspeed_config": deepspeed_config, **steps}


Point = tuple[int, str, str]  # processes, DeepSpeed JSON, dtype
ALL: list[tuple[Point, Point]] = [
    *(
        ((*wrote, "float32"), (*read, "float32"))
        for wrote in WRITERS
        for read in sorted({*READERS, wrote})
    ),
    *(((*point, "bfloat16"), (*point, "bfloat16")) for point in BFLOAT16),
]
# Of other numbers of processes, stages and places of the optimizer; and one its own.
SOME: list[tuple[Point, Point]] = [
    ((2, "zero3_offload", "float32"), (1, "zero0", "float32")),
    ((2, "zero1", "float32"), (2, "zero3", "float32")),
    ((2, "zero3_offload", "float32"), (2, "zero2_offload", "float32")),
    ((2, "zero3", "bfloat16"), (2, "zero3", "bfloat16")),
]
OTHERS = [pair for pair in ALL if pair not in SOME]


def name_of(point: Point) -> str:
    return "-".join(map(str, point))


def write_and_read(
    data: Path, pairs: list[tuple[Point, Point]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Uninterrupted runs that save at STOP, then every reader on its writer's checkpoint."""
    root = tmp_path_factory.mktemp("resume")
    results_by_case: dict[str, Any] = {}

    def readers(world_size: int) -> dict[str, Any]:
        return {
            f"{name_of(wrote)}-to-{name_of(read)}": case(
                data,
                *read,
                first_step=STOP,
                last_step=END,
                restore_from=str(root / name_of(wrote)),
                save_again_to=str(root / "again" / f"{name_of(wrote)}-to-{name_of(read)}"),
            )
            for wrote, read in pairs
            if read[0] == world_size
        }

    for world_size in (1, 2):
        cases = {
            f"write-{name_of(point)}": case(
                data, *point, last_step=END, save_at=STOP, save_to=str(root / name_of(point))
            )
            for point in dict.fromkeys(wrote for wrote, _ in pairs)
            if point[0] == world_size
        }
        if world_size == 2:  # all has been written when they begin
            cases |= readers(2)
        if cases:
            results_by_case.update(train_cases(world_size, cases, tmp_path_factory.mktemp("write")))
    results_by_case.update(train_cases(1, readers(1), tmp_path_factory.mktemp("read")))
    return root, results_by_case


@pytest.fixture(scope="module")
def some(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return write_and_read(dataset, SOME, tmp_path_factory)


@pytest.fixture(scope="module")
def others(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return write_and_read(dataset, OTHERS, tmp_path_factory)


def test_the_tiers_are_everything() -> None:
    assert sorted(SOME + OTHERS) == sorted(ALL)


@pytest.mark.parametrize(("wrote", "read"), SOME, ids=name_of)
def test_goes_on(wrote: Point, read: Point, some: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(wrote, read, *some)


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "read"), OTHERS, ids=name_of)
def test_others_go_on(wrote: Point, read: Point, others: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(wrote, read, *others)


def assert_goes_on(wrote: Point, read: Point, root: Path, results_by_case: dict[str, Any]) -> None:
    name = f"{name_of(wrote)}-to-{name_of(read)}"
    uninterrupted, resumed = results_by_case[f"write-{name_of(wrote)}"], results_by_case[name]
    if wrote == read:
        assert resumed["losses"] == uninterrupted["losses"][STOP:]
        assert resumed["norms"] == uninterrupted["norms"][STOP:]
    saved = read_full(root / name_of(wrote) / "tensors")
    again = read_full(root / "again" / name / "tensors")
    assert saved.keys() == again.keys()
    assert any(key.startswith("exp_avg_sq/") for key in saved)
    for key, tensor in saved.items():
        assert torch.equal(tensor, again[key]), key
