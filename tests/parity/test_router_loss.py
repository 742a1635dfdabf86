"""The router's auxiliary loss under every kind of parallelism, as plain transformers computes it.

It is no sum over tokens or layers. What it is taken over is a micro-batch, in the reference too:
its samples whole and all of its layers, wherever they are computed; a step's is the micro-batches'
mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bigtrain.engine.checkpoint.io import read_full_masters
from tests.parity.conftest import (
    ARCHITECTURES,
    SavedModels,
    TrainedCases,
    each_case,
    llama,
    run_config,
)
from tests.parity.expert_models import COEFFICIENT, OPTIMIZER, ROUTED, WEIGHTS
from tests.parity.plain import divided, plain_training
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps, assert_same_tensors

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": llama(
        model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=4
    )
    | ROUTED,
    # Of four layers the second and fourth have experts: the first stage has one of them.
    "qwen3_moe": {
        **ARCHITECTURES["qwen3_moe"],
        **ROUTED,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "intermediate_size": 32,
    },
}


@dataclass(frozen=True)
class Case:
    """One point, on two processes."""

    engine: str
    accumulation: int
    model: str
    parallel: str = "data"
    checkpointing: str = "none"
    slow: bool = False
    world_size: int = 2

    @property
    def name(self) -> str:
        return f"{self.parallel}-{self.engine}-accumulation{self.accumulation}-{self.model}"

    @property
    def micro_batch_size(self) -> int:
        return 8 // (self.accumulation * (2 if self.parallel == "data" else 1))


CASES = [
    Case("zero1", 2, "mixtral"),
    Case("zero3", 1, "qwen3_moe", slow=True),
    Case("zero2", 2, "mixtral", "tensor", slow=True),
    Case("zero0", 2, "mixtral", "pipeline", "full", slow=True),
    Case("zero1", 4, "qwen3_moe", "pipeline", slow=True),
    Case("zero1", 2, "mixtral", "sequence", slow=True),
    Case("zero3", 1, "qwen3_moe", "sequence", "full", slow=True),
]


def config_of(case: Case, data: Path) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"config": MODELS[case.model], "gradient_checkpointing": case.checkpointing},
        micro_batch_size=case.micro_batch_size,
        parallel={} if case.parallel == "data" else {case.parallel: 2},
        optimizer=OPTIMIZER,
    )
    return config


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedCases[Case]:
    directory = tmp_path_factory.mktemp("router")
    return TrainedCases(directory, CASES, lambda case: config_of(case, dataset))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(MODELS, tmp_path_factory.mktemp("hf"))


@each_case(CASES)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    expected = plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size),
        aux_coefficient=COEFFICIENT,
    )
    result, place = trained.of(case)
    assert result["accumulation"] == case.accumulation
    # The loss that is reported is the cross-entropy alone.
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    weights = read_full_masters(place / "tensors")
    assert weights.keys() <= expected.weights.keys()
    assert sum(tensor.numel() for tensor in weights.values()) > 10_000
    own = {name: expected.weights[name] for name in weights}
    assert_same_tensors(weights, own, limit=WEIGHTS)
