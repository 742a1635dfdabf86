"""Tensor parallelism computes what a plain loop in one process does, and so do its checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bigtrain.engine.checkpoint.io import read_full
from tests.parity.conftest import ARCHITECTURES, STEPS, References, SavedModels, llama, run_config
from tests.parity.conftest import train_cases as train
from tests.parity.plain import Training
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps, assert_same_tensors

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WEIGHT = 1e-5

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


@dataclass(frozen=True)
class Case:
    """One point: ZeRO stage by its JSON, `tensor` x `data` processes."""

    engine: str
    tensor: int = 2
    data: int = 1
    model: str = "odd"
    accumulation: int = 1
    recompute: str = "none"
    dtype: str = "float32"
    trained: bool = field(default=False)

    @property
    def name(self) -> str:
        return (
            f"{self.engine}-tensor{self.tensor}-data{self.data}-{self.model}-"
            f"accumulation{self.accumulation}-recompute_{self.recompute}-{self.dtype}"
            f"{'-trained' if self.trained else ''}"
        )


COVERING = [
    Case("zero0", model="odd", accumulation=2, recompute="full"),
    Case("zero3_offload", model="qwen3"),
    Case("zero3", model="odd_experts", trained=True),
]
MORE = [
    Case("zero1", model="qwen3", accumulation=4),
    Case("zero1", model="qwen3_moe", recompute="full"),
    Case("zero2", model="phi3", recompute="full", trained=True),
    Case("zero3", model="qwen3_moe", trained=True),
    Case("zero3", data=2, model="qwen3_moe", recompute="full"),
    Case("zero1", tensor=1, data=2, model="odd_experts", dtype="bfloat16"),
    Case("zero2_offload", model="odd"),
    Case("zero1", model="odd_experts"),
    Case("zero2", model="odd_experts", dtype="bfloat16"),
    Case("zero2", tensor=4, model="odd"),  # two key-value heads for four processes
]


def everything() -> list[Case]:
    """All that the covering set covers, and `MORE`."""
    return MORE + [
        case
        for engine in ("zero0", "zero1", "zero2", "zero3")
        for data in (1, 2)
        for model in MODELS
        for accumulation in (1, 4)
        for recompute in ("none", "full")
        for dtype in ("float32", "bfloat16")
        if (case := Case(engine, 2, data, model, accumulation, recompute, dtype))
        not in COVERING + MORE
    ]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model as the run's seed makes it, saved by plain transformers."""
    return SavedModels(MODELS, tmp_path_factory.mktemp("tensor"))


@pytest.fixture(scope="module")
def references(dataset: Path, directories: dict[str, Path]) -> References:
    return References(dataset, directories)


def configured(dataset: Path, directories: dict[str, Path], case: Case) -> dict[str, Any]:
    model: dict[str, Any] = {"gradient_checkpointing": case.recompute}
    if case.trained:
        model["path"] = str(directories[case.model])
    else:
        model["config"] = MODELS[case.model]
    config = run_config(
        dataset,
        model,
        micro_batch_size=8 // (case.data * case.accumulation),
        precision={"dtype": case.dtype},
        parallel={"tensor": case.tensor},
    )
    return {"config": config, "deepspeed_config": case.engine}


def train_all(
    dataset: Path, directories: dict[str, Path], cases: list[Case], root: Path
) -> dict[str, Any]:
    """Figures of every case by name, and its final masters by parameter."""
    results_by_case: dict[str, Any] = {}
    for size in sorted({case.tensor * case.data for case in cases}):
        chosen = [case for case in cases if case.tensor * case.data == size]
        (root / str(size)).mkdir()
        asked = {
            case.name: configured(dataset, directories, case)
            | {"save_at": STEPS, "save_to": str(root / case.name), "evaluates": True}
            for case in chosen
        }
        results_by_case |= train(size, asked, root / str(size))
    for case in cases:
        masters = read_full(root / case.name / "tensors", prefixes=("master",))
        results_by_case[case.name]["weights"] = {k.split("/", 1)[1]: v for k, v in masters.items()}
    return results_by_case


def assert_equal(case: Case, reference: Training, result: dict[str, Any]) -> None:
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, reference, loss=LOSS[case.dtype], norm=NORM[case.dtype])
    assert result["weights"].keys() == reference.weights.keys()
    if case.dtype == "float32":
        assert_same_tensors(result["weights"], reference.weights, limit=WEIGHT)


@pytest.fixture(scope="module")
def results(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return train_all(dataset, directories, COVERING, tmp_path_factory.mktemp("covering"))


@pytest.mark.parametrize("case", COVERING, ids=lambda case: case.name)
def test_equals_plain_training(case: Case, references: References, results: dict[str, Any]) -> None:
    assert_equal(case, references[case.model], results[case.name])
    assert len(set(map(tuple, results[case.name]["held_out"]))) == 1, "ranks evaluate differently"


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
        losses.append(train(size, {"phi": case}, tmp_path / str(size))["phi"]["losses"])
    assert losses[0] == pytest.approx(losses[1], abs=LOSS["float32"])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_everything_equals_plain_training(
    dataset: Path,
    directories: dict[str, Path],
    references: References,
    tmp_path: Path,
) -> None:
    cases = everything()
    results_by_case = train_all(dataset, directories, cases, tmp_path)
    wrong = {}
    for case in cases:
        try:
            assert_equal(case, references[case.model], results_by_case[case.name])
        except AssertionError as error:
            wrong[case.name] = str(error)[:300]
    assert not wrong, json.dumps(wrong, indent=1)
