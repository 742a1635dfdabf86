"""Tensor parallelism computes what a plain loop in one process does, and so do its checkpoints."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import LOSS, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import ARCHITECTURES, each_case, llama, run_config, train_cases

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

# The vocabulary of 97 divides by no degree; "odd" has nothing else that does. What is divisible is
# in `test_matrix.py`.
MODELS: dict[str, dict[str, Any]] = {
    "odd": llama(intermediate_size=63, tie_word_embeddings=False, attention_bias=True),
    "qwen3": llama(model_type="qwen3", head_dim=8),
    "phi3": llama(model_type="phi3", pad_token_id=0),
    "qwen3_moe": ARCHITECTURES["qwen3_moe"] | {"tie_word_embeddings": True},
    # Parts of 10, which grouped matrix products do not take; in 16 bit they take no 20 either.
    "odd_experts": ARCHITECTURES["qwen3_moe"] | {"moe_intermediate_size": 20},
}
TENSOR = {"tensor": 2}
CASES = [
    Case(2, "zero0", "odd", 2, TENSOR, RECOMPUTE, slow=False),
    Case(2, "zero3_offload", "qwen3", 1, TENSOR),
    Case(2, "zero3", "odd_experts", 1, TENSOR, slow=False),
    Case(2, "zero2_offload", "odd", 1, TENSOR),
    Case(4, "zero2", "odd", 1, {"tensor": 4}),  # two key-value heads for four processes
    Case(2, "zero1", "odd_experts", 1, dtype="bfloat16"),
]
# Every model at every stage; the other axes in turn.
CASES += [
    Case(2 + 2 * (number % 2), engine, model, 1 + 3 * (number // 2 % 2), TENSOR, sections, dtype)
    for number, (engine, model) in enumerate(product((f"zero{z}" for z in range(4)), MODELS))
    for sections, dtype in [
        (RECOMPUTE if number % 3 else {}, "bfloat16" if number % 4 == 3 else "float32")
    ]
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    directory = tmp_path_factory.mktemp("tensor")
    return PlainRuns(directory, dataset, MODELS, CASES, from_files=True, evaluates=True)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    result, _ = runs.check(case)
    if case.num_replicas == 1:
        assert len(set(map(tuple, result["held_out"]))) == 1, "ranks evaluate differently"


@pytest.mark.slow
def test_dropout_outside_uneven_parts_draws_the_same(dataset: Path, tmp_path: Path) -> None:
    """On hidden states; a process alone has the same masks."""
    dropping = llama(
        model_type="phi",
        intermediate_size=63,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        tie_word_embeddings=False,
    )
    losses = []
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        config = run_config(
            dataset, {"config": dropping}, micro_batch_size=8, parallel={"tensor": size}
        )
        case = {"config": config, "deepspeed_config": "zero1"}
        losses.append(train_cases(size, {"phi": case}, tmp_path / str(size))["phi"]["losses"])
    assert losses[0] == pytest.approx(losses[1], abs=LOSS["float32"])
