"""The same numbers as a loop of plain transformers and torch.optim.AdamW in one process.

What `test_matrix.py` has no axis for: offload, trained weights, every n-th layer, architectures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conftest import ARCHITECTURES, STEPS, References, run_config, train_cases
from tests.parity.plain import Training
from tests.support.comparison import assert_same_steps

# All cases are trained in the first test's set-up.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Case:
    """A run without model parallelism."""

    world_size: int
    deepspeed_config: str
    accumulation: int
    gradient_checkpointing: str | int
    architecture: str = "llama"
    trained_weights: bool = False

    @property
    def name(self) -> str:
        return (
            f"{self.deepspeed_config}-world{self.world_size}-accumulation{self.accumulation}-"
            f"checkpointing_{self.gradient_checkpointing}-{self.architecture}"
            f"{'-trained' if self.trained_weights else ''}"
        )


OFFLOADED = [
    Case(world_size, config, accumulation, checkpointing)
    for world_size in (1, 2)
    for config in ("zero2_offload", "zero3_offload")
    for accumulation in (1, 4)
    for checkpointing in ("none", "full")
]
FEW = [OFFLOADED[number] for number in (8, 15)]  # of each stage one, of all values one
OTHERS = [case for case in OFFLOADED if case not in FEW]
OTHERS += [
    Case(2, "zero3", 1, 2),
    Case(2, "zero3", 1, "none", trained_weights=True),
    Case(2, "zero3", 2, "full", "qwen3_moe"),
    Case(1, "zero2", 8, "none"),
    Case(1, "zero1", 1, "none", trained_weights=True),
    Case(2, "zero1", 2, "full", "gpt2"),
    Case(2, "zero1", 2, "full", "qwen3_moe"),
    Case(2, "zero3", 2, "full", "gpt2"),
]


LOSS = {"float32": 1e-5, "bfloat16": 2e-3}
NORM = {"float32": 1e-4, "bfloat16": 1e-2}


@pytest.fixture(scope="module")
def references(dataset: Path, hf_directories: dict[str, Path]) -> References:
    return References(dataset, hf_directories)


def test_reference_learns_and_clips(references: References) -> None:
    training = references["llama"]
    assert training.losses[-1] < training.losses[0] - 0.015 * STEPS
    assert min(training.norms) > 0.5


def train_all(
    cases: list[Case], data: Path, directories: dict[str, Path], root: Path
) -> dict[str, Any]:
    """Losses and gradient norms of every case, by name."""
    results_by_case: dict[str, Any] = {}
    for world_size in sorted({case.world_size for case in cases}):
        asked = {}
        for case in cases:
            if case.world_size != world_size:
                continue
            model: dict[str, Any] = {"gradient_checkpointing": case.gradient_checkpointing}
            if case.trained_weights:
                model["path"] = str(directories[case.architecture])
            else:
                model["config"] = ARCHITECTURES[case.architecture]
            micro_batch_size = 8 // (world_size * case.accumulation)
            asked[case.name] = {
                "config": run_config(data, model, micro_batch_size=micro_batch_size),
                "deepspeed_config": case.deepspeed_config,
            }
        (root / str(world_size)).mkdir()
        results_by_case |= train_cases(world_size, asked, root / str(world_size))
    return results_by_case


@pytest.fixture(scope="module")
def results(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return train_all(FEW, dataset, hf_directories, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def other_results(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return train_all(OTHERS, dataset, hf_directories, tmp_path_factory.mktemp("others"))


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_equals_plain_training(case: Case, references: References, results: dict[str, Any]) -> None:
    assert_equal(case, references[case.architecture], results[case.name])


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_others_equal_plain_training(
    case: Case, references: References, other_results: dict[str, Any]
) -> None:
    assert_equal(case, references[case.architecture], other_results[case.name])


def assert_equal(case: Case, expected: Training, result: dict[str, Any]) -> None:
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
