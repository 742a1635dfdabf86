"""Muon, Lion and Adafactor in bfloat16, and optimizer states in bfloat16, against plain PyTorch.

Runs in 16 bit that only add up in other orders are apart, and a moment that is rounded by chance
parts them as well: what the engine trains is to be among such plain runs (`Spread`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import plain_optimizers
from tests.parity.conftest import STEPS, is_deselected, run_config, train_cases
from tests.parity.plain import Spread, orders, plain_training, root_mean_square
from tests.parity.test_matrix import SPREADS

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw", "eps": 1e-6},
    "muon": {"type": "muon", "eps": 1e-6},
    "lion": {"type": "lion", "lr": 3e-4},
    # As with eps above: or an element whose gradient is all rounding error moves as any other, by
    # its sign.
    "adafactor": {"type": "adafactor", "lr": 1e-2, "adafactor": {"eps1": 1e-4}},
}
WIDE_MUON = {"muon": {"ns_dtype": "float32"}}


@dataclass(frozen=True)
class Case:
    """kept: whether it is the states that are in bfloat16, and all else is in float32."""

    optimizer: str
    engine: str
    degrees: dict[str, int] = field(default_factory=dict)
    kept: bool = False

    @property
    def name(self) -> str:
        degrees = "-".join(f"{axis}{size}" for axis, size in self.degrees.items())
        what = "states" if self.kept else "model"
        return f"{self.optimizer}-{what}-{self.engine}-{degrees or 'data'}"

    @property
    def section(self) -> dict[str, Any]:
        section = {"lr": 3e-3, "clip_norm": 0.5} | OPTIMIZERS[self.optimizer]
        if self.kept:
            section |= {"state_dtype": "bfloat16"}
            section |= WIDE_MUON if self.optimizer == "muon" else {}
        return section


PLACES: tuple[tuple[str, dict[str, int]], ...] = (
    ("zero1", {}),
    ("zero2", {}),
    ("zero3", {}),
    ("zero1", {"tensor": 2}),
    ("pipeline_zero1", {"pipeline": 2}),
)
FAST = {"muon-model-zero3-data"}
CASES = [
    Case(optimizer, engine, degrees, kept)
    for kept, optimizers in (
        (False, ("muon", "lion", "adafactor")),
        (True, ("adamw", "muon", "lion")),
    )
    for optimizer in optimizers
    for engine, degrees in PLACES
]


def config_of(case: Case, data: Path, directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directory)},
        micro_batch_size=4 if case.degrees else 2,
        parallel=case.degrees,
        optimizer=case.section,
        precision={"dtype": "float32" if case.kept else "bfloat16"},
    )
    return config


def train(cases: list[Case], data: Path, directory: Path, place: Path) -> dict[str, Any]:
    jobs = {
        case.name: {
            "config": config_of(case, data, directory),
            "deepspeed_config": case.engine,
            "weights": {str(STEPS): str(place / f"{case.name}.pt")},
        }
        for case in cases
    }
    results_by_case = train_cases(2, jobs, place)
    return {n: results_by_case[n] | {"weights": torch.load(place / f"{n}.pt")} for n in jobs}


@pytest.fixture(scope="module")
def trained(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    cases = [case for case in CASES if case.name in FAST]
    place = tmp_path_factory.mktemp("optimizers-in-16-bit")
    return train(cases, dataset, hf_directories["llama"], place)


@pytest.fixture(scope="module")
def slow_trained(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    cases = [case for case in CASES if case.name not in FAST and not is_deselected(case)]
    place = tmp_path_factory.mktemp("optimizers-in-16-bit-slow")
    return train(cases, dataset, hf_directories["llama"], place)


SpreadOf = Callable[[str, bool, bool], Spread]


@pytest.fixture(scope="module")
def spread(dataset: Path, hf_directories: dict[str, Path]) -> SpreadOf:
    """Of plain runs with an optimizer; halves: as tensor-parallel processes round in 16 bit."""

    @cache
    def of(optimizer: str, kept: bool, halves: bool) -> Spread:
        case = Case(optimizer, "zero1", kept=kept)
        config = config_of(case, dataset, hf_directories["llama"])
        make = getattr(plain_optimizers, f"kept_{optimizer}" if kept else optimizer)
        return Spread.of(
            [
                plain_training(
                    dataset,
                    hf_directories["llama"],
                    config,
                    chunks=chunks,
                    dtype=torch.float32 if kept else torch.bfloat16,
                    halves=halves,
                    # Lion's and Adafactor's runs are so near to each other that it would show.
                    exact_masters=True,
                    optimizer_of=make,
                )
                for chunks in orders()
            ]
        )

    return of


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for case in CASES
    ],
)
def test_16_bit_is_among_plain_runs(
    case: Case, spread: SpreadOf, request: pytest.FixtureRequest
) -> None:
    result = request.getfixturevalue("trained" if case.name in FAST else "slow_trained")[case.name]
    plain = spread(case.optimizer, case.kept, not case.kept and "tensor" in case.degrees)
    losses = [abs(a - b) for a, b in zip(result["losses"], plain.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(result["norms"], plain.norms, strict=True)]
    assert max(losses) <= SPREADS * plain.loss
    assert max(norms) <= SPREADS * plain.norm < 0.1
    assert root_mean_square(result["weights"], plain.weights) <= SPREADS * plain.weight
