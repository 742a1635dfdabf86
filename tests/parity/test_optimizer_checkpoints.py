"""States of other optimizers than AdamW go from any topology to any other, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.engine.optimizers.adamw_8bit import CODES, SCALES
from tests.parity.conftest import is_deselected, llama, run_config, train_cases

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = 3, 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"type": "muon", "muon": {"ns_dtype": "float32"}},
    "muon in bfloat16": {"type": "muon", "state_dtype": "bfloat16"},
    "lion": {"type": "lion"},
    "adafactor": {"type": "adafactor"},
    "adamw_8bit": {"type": "adamw_8bit"},
}
# Of 8-bit AdamW: matrices of 20.25 and 29.25 blocks, and smaller ones in float32.
MODELS = {"adamw_8bit": llama(hidden_size=72, intermediate_size=104)}
STATES = {
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "muon in bfloat16": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "lion": {"exp_avg"},
    "adafactor": {"row_var", "col_var", "variance"},
    "adamw_8bit": {"exp_avg", "exp_avg_sq", *CODES, *SCALES},
}


class Point(NamedTuple):
    """Who writes or reads."""

    engine: str
    degrees: tuple[tuple[str, int], ...] = ()
    world_size: int = 2

    @property
    def name(self) -> str:
        axes = "".join(f"-{axis}{size}" for axis, size in self.degrees)
        return f"{self.engine}-of-{self.world_size}{axes}"


POINTS = (
    Point("zero0", world_size=1),
    Point("zero3"),
    Point("zero1", (("tensor", 2),)),
    Point("pipeline_zero1", (("pipeline", 2),)),
)


class Trip(NamedTuple):
    """A checkpoint from one to another."""

    optimizer: str
    wrote: Point
    read: Point

    @property
    def name(self) -> str:
        return f"{self.optimizer}: {self.wrote.name} to {self.read.name}"


ALL = [Trip(*trip) for trip in product(OPTIMIZERS, POINTS, POINTS)]


def case(data: Path, optimizer: str, point: Point, **steps: Any) -> dict[str, Any]:
    inner = 1
    for _, size in point.degrees:
        inner *= size
    config = run_config(
        data,
        {"config": MODELS.get(optimizer, llama())},
        micro_batch_size=4 * inner // point.world_size,
        parallel=dict(point.degrees),
        optimizer={"lr": 3e-3, "clip_norm": 0.5}
        | ({} if optimizer in ("lion", "adafactor") else {"eps": 1e-6})
        | OPTIMIZERS[optimizer],
    )
    return {"config": config, "deepspeed_config": point.engine, **steps}


def travel(
    data: Path, trips: list[Trip], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Every writer to END without a break, then every reader from STOP on."""
    root = tmp_path_factory.mktemp("optimizer-checkpoints")
    results_by_case: dict[str, Any] = {}
    writers = dict.fromkeys((trip.optimizer, trip.wrote) for trip in trips)
    for size in (1, 2):
        cases = {
            f"{name} {wrote.name}": case(
                data,
                name,
                wrote,
                last_step=END,
                save_at=STOP,
                save_to=str(root / f"{name} {wrote.name}"),
            )
            for name, wrote in writers
            if wrote.world_size == size
        }
        results_by_case |= train_cases(size, cases, tmp_path_factory.mktemp("write"))
    for size in (1, 2):
        cases = {
            trip.name: case(
                data,
                trip.optimizer,
                trip.read,
                first_step=STOP,
                last_step=END,
                restore_from=str(root / f"{trip.optimizer} {trip.wrote.name}"),
                save_again_to=str(root / trip.name),
            )
            for trip in trips
            if trip.read.world_size == size
        }
        results_by_case |= train_cases(size, cases, tmp_path_factory.mktemp("read"))
    return root, results_by_case


@pytest.fixture(scope="module")
def everything(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    trips = [trip for trip in ALL if not is_deselected(trip)]
    return travel(dataset, trips, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("trip", ALL, ids=lambda trip: trip.name)
def test_goes_on_from_anywhere(trip: Trip, everything: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(trip, *everything)


def assert_goes_on(trip: Trip, root: Path, results_by_case: dict[str, Any]) -> None:
    writer = f"{trip.optimizer} {trip.wrote.name}"
    saved = read_full(root / writer / "tensors")
    again = read_full(root / trip.name / "tensors")
    kinds = {key.partition("/")[0] for key in saved}
    assert kinds - {"buffer"} == STATES[trip.optimizer] | {"master"}
    assert saved.keys() == again.keys()
    for key, tensor in saved.items():
        assert torch.equal(tensor, again[key]), key
        assert key.startswith("buffer") or tensor.any(), key
    uninterrupted, resumed = results_by_case[writer], results_by_case[trip.name]
    if trip.wrote == trip.read:
        assert resumed["losses"] == uninterrupted["losses"][STOP:]
        assert resumed["norms"] == uninterrupted["norms"][STOP:]
    elif "bfloat16" not in trip.optimizer:
        assert resumed["losses"] == pytest.approx(uninterrupted["losses"][STOP:], abs=1e-5)
        assert resumed["norms"] == pytest.approx(uninterrupted["norms"][STOP:], rel=1e-4)
