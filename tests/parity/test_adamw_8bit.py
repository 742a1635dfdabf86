"""AdamW with moments of 8 bits at every topology, against bitsandbytes in one process.

Of equal gradients both give the same bits (tests/unit/engine/optimizers/test_adamw_8bit.py). Here
gradients add up in other orders, and where a moment is between two of 256 values their last bits
choose one: so single weights of bitsandbytes' own runs differ, and ours are to be as near to those
as they are to each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from tests.parity import plain_optimizers
from tests.parity.conftest import (
    ARCHITECTURES,
    SavedModels,
    TrainedCases,
    each_case,
    llama,
    run_config,
)
from tests.parity.plain import Spread, orders, plain_training, root_mean_square, whole
from tests.parity.test_matrix import SPREADS
from tests.support.tiers import STEPS

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]

LOSS = 1e-4
NORM = 1e-3
NUM_STEPS = max(12, STEPS)
MODELS = {
    # Matrices of 5,184 and 7,488 elements: 20.25 and 29.25 blocks; smaller ones, in float32.
    "llama": llama(hidden_size=72, intermediate_size=104),
    "qwen3_moe": {**ARCHITECTURES["qwen3_moe"], "hidden_size": 72, "moe_intermediate_size": 52},
}


@dataclass(frozen=True)
class Case:
    world_size: int
    engine: str
    degrees: dict[str, int] = field(default_factory=dict)
    model: str = "llama"
    dtype: str = "float32"
    slow: bool = False

    @property
    def name(self) -> str:
        degrees = "-".join(f"{axis}{size}" for axis, size in self.degrees.items())
        what = f"{self.model}-{self.dtype}"
        return f"{what}-{self.engine}-of-{self.world_size}-{degrees or 'data'}"

    @property
    def micro_batch_size(self) -> int:
        inner = prod(size for axis, size in self.degrees.items() if axis != "expert")
        return 4 * inner // self.world_size


CASES = [
    Case(1, "zero0", slow=True),
    Case(2, "zero0", slow=True),
    Case(2, "zero1", slow=True),
    Case(2, "zero2", slow=True),
    Case(2, "zero3"),
    Case(2, "zero2_offload", slow=True),
    Case(2, "zero3_offload", slow=True),
    Case(2, "zero0", {"tensor": 2}, slow=True),
    Case(2, "pipeline_zero1", {"pipeline": 2}),
    Case(2, "zero1", {"sequence": 2}, slow=True),
    Case(4, "zero3", {"tensor": 2}, slow=True),
    Case(4, "pipeline_zero1", {"pipeline": 2, "tensor": 2}, slow=True),
    *(Case(2, engine, dtype="bfloat16", slow=True) for engine in ("zero1", "zero2", "zero3")),
    Case(2, "zero1", {"expert": 2}, "qwen3_moe", slow=True),
    Case(2, "zero3", {"expert": 2}, "qwen3_moe", slow=True),
    Case(4, "zero2", {"tensor": 2, "expert": 2}, "qwen3_moe", slow=True),
]


def config_of(data: Path, directories: dict[str, Path], case: Case) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directories[case.model])},
        micro_batch_size=case.micro_batch_size,
        parallel=case.degrees,
        optimizer={"type": "adamw_8bit", "lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6},
        train={"steps": NUM_STEPS},
        precision={"dtype": case.dtype},
    )
    return config


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(MODELS, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(
        tmp_path_factory.mktemp("adamw-8bit"),
        CASES,
        lambda case: config_of(dataset, directories, case),
        lambda _: {"save_at": NUM_STEPS},
    )


@pytest.fixture(scope="module")
def spread_of(dataset: Path, directories: dict[str, Path]) -> Callable[[str, str, bool], Spread]:
    """Spread of bitsandbytes' own runs that add up in other orders, by model and dtype, and whether
    products are in halves, as of two tensor ranks: then plain runs are three times as far apart."""

    @cache
    def spread(model: str, dtype: str, halves: bool) -> Spread:
        config = config_of(dataset, directories, Case(1, "zero0", model=model, dtype=dtype))
        return Spread.of(
            [
                plain_training(
                    dataset,
                    directories[model],
                    config,
                    chunks=chunks,
                    dtype=getattr(torch, dtype),
                    exact_masters=True,
                    halves=halves,
                    halves_seed=seed,
                    optimizer_of=plain_optimizers.adamw_8bit,
                )
                for seed, chunks in enumerate(orders())
            ]
        )

    return spread


@each_case(CASES)
def test_is_among_runs_of_bitsandbytes(
    case: Case, spread_of: Callable[[str, str, bool], Spread], trained: TrainedCases[Case]
) -> None:
    result, place = trained.of(case)
    spread = spread_of(case.model, case.dtype, case.degrees.get("tensor") == 2)
    losses = [abs(a - b) for a, b in zip(result["losses"], spread.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(result["norms"], spread.norms, strict=True)]
    distance = root_mean_square(read_full_masters(place / "tensors"), spread.weights)
    assert len(losses) >= 12
    assert max(losses) <= SPREADS * spread.loss
    assert max(norms) <= SPREADS * spread.norm
    assert distance <= SPREADS * spread.weight
    if case.dtype == "float32":
        assert max(losses) < max(LOSS, SPREADS * spread.loss)
        assert max(norms) < max(NORM, SPREADS * spread.norm)


def test_blocks_of_a_part_would_show(
    dataset: Path, directories: dict[str, Path], spread_of: Callable[[str, str, bool], Spread]
) -> None:
    """Blocks that are counted from where a rank's half of a parameter begins, as where each rank
    makes bitsandbytes' update of what it has, are farther away than is allowed."""
    case = Case(2, "zero1")
    spread = spread_of(case.model, case.dtype, False)
    parts = plain_training(
        dataset,
        directories[case.model],
        config_of(dataset, directories, case),
        chunks=whole,
        optimizer_of=partial(plain_optimizers.adamw_8bit_of_parts, num_parts=2),
    )
    losses = [abs(a - b) for a, b in zip(parts.losses, spread.losses, strict=True)]
    assert max(losses) > 2 * max(LOSS, SPREADS * spread.loss)
    assert root_mean_square(parts.weights, spread.weights) > 5 * SPREADS * spread.weight
