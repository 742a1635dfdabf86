"""AdamW with moments of 8 bits at every topology, against bitsandbytes in one process.

Of equal gradients both give the same bits (tests/unit/engine/optimizers/test_adamw_8bit.py). Here
gradients add up in other orders, and where a moment is between two of 256 values their last bits
choose one: so single weights of bitsandbytes' own runs differ, and ours are to be as near to those
as they are to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from tests.parity import plain_optimizers
from tests.parity.cases import SPREADS, Case, PlainRuns, assert_among
from tests.parity.conftest import ARCHITECTURES, each_case, llama
from tests.parity.plain import Spread, orders, root_mean_square, whole
from tests.support.tiers import STEPS

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]

NUM_STEPS = max(12, STEPS)
MODELS = {
    # Matrices of 5,184 and 7,488 elements: 20.25 and 29.25 blocks; smaller ones, in float32.
    "llama": llama(hidden_size=72, intermediate_size=104),
    "qwen3_moe": {**ARCHITECTURES["qwen3_moe"], "hidden_size": 72, "moe_intermediate_size": 52},
}


SECTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {"type": "adamw_8bit", "lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6},
    "train": {"steps": NUM_STEPS},
}


def case(
    world_size: int,
    engine: str,
    model: str = "llama",
    dtype: str = "float32",
    **degrees: int,
) -> Case:
    return Case(world_size, engine, model, 2, degrees, SECTIONS, dtype)


CASES = [
    case(1, "zero0"),
    *(case(2, engine) for engine in ("zero1", "zero3", "zero2_offload")),
    case(2, "zero0", tensor=2),
    case(2, "pipeline_zero1", pipeline=2),
    case(4, "zero3", tensor=2),
    case(2, "zero2", "llama", "bfloat16"),
    case(2, "zero3", "qwen3_moe", expert=2),
    case(4, "zero2", "qwen3_moe", tensor=2, expert=2),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def plain_of(_: Case) -> dict[str, Any]:
        return {"optimizer_of": plain_optimizers.adamw_8bit, "exact_masters": True}

    return PlainRuns(
        tmp_path_factory.mktemp("adamw-8bit"),
        dataset,
        MODELS,
        CASES,
        from_files=True,
        plain_of=plain_of,
        save_at=NUM_STEPS,
    )


@pytest.fixture(scope="module")
def spread_of(runs: PlainRuns) -> Callable[[Case], Spread]:
    """Spread of bitsandbytes' own runs that add up in other orders; with products in halves, as of
    two tensor ranks, plain runs are three times as far apart."""
    spreads: dict[Any, Spread] = {}

    def of(case: Case) -> Spread:
        halves = case.degrees.get("tensor") == 2
        key = case.model, case.dtype, halves
        if key not in spreads:
            options = {"dtype": getattr(torch, case.dtype), "halves": halves}
            spreads[key] = Spread.of(
                [
                    runs.plain(case, chunks=chunks, halves_seed=seed, **options)
                    for seed, chunks in enumerate(orders())
                ]
            )
        return spreads[key]

    return of


@each_case(CASES)
def test_is_among_runs_of_bitsandbytes(
    case: Case, spread_of: Callable[[Case], Spread], runs: PlainRuns
) -> None:
    result, place = runs.trained(case)
    spread = spread_of(case)
    assert len(result["losses"]) >= 12
    weights = read_full_masters(place / "tensors")
    assert_among(result, weights, spread, largest_norm=math.inf)


def test_blocks_of_a_part_would_show(spread_of: Callable[[Case], Spread], runs: PlainRuns) -> None:
    """Blocks that are counted from where a rank's half of a parameter begins, as where each rank
    makes bitsandbytes' update of what it has, are farther away than is allowed."""
    case = next(case for case in CASES if case.engine == "zero1")
    spread = spread_of(case)
    make = partial(plain_optimizers.adamw_8bit_of_parts, num_parts=2)
    parts = runs.plain(case, chunks=whole, optimizer_of=make, exact_masters=False)
    losses = [abs(a - b) for a, b in zip(parts.losses, spread.losses, strict=True)]
    assert max(losses) > 2 * max(1e-4, SPREADS * spread.loss)
    assert root_mean_square(parts.weights, spread.weights) > 5 * SPREADS * spread.weight
