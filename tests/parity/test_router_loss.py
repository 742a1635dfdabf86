"""The router's auxiliary loss under every kind of parallelism, as plain transformers computes it.

It is no sum over tokens or layers. What it is taken over is a micro-batch, in the reference too:
its samples whole and all of its layers, wherever they are computed; a step's is the micro-batches'
mean. The loss that is reported is the cross-entropy alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import EPS, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import ARCHITECTURES, each_case, llama
from tests.parity.expert_models import COEFFICIENT, ROUTED
from tests.parity.plain import divided

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
CASES = [
    Case(2, "zero1", "mixtral", sections=EPS, slow=False),
    Case(2, "zero3", "qwen3_moe", 1, sections=EPS),
    Case(2, "zero2", "mixtral", 2, {"tensor": 2}, EPS),
    Case(2, "zero0", "mixtral", 2, {"pipeline": 2}, EPS | RECOMPUTE),
    Case(2, "zero1", "qwen3_moe", 4, {"pipeline": 2}, EPS),
    Case(2, "zero3", "qwen3_moe", 1, {"sequence": 2}, EPS | RECOMPUTE),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def plain_of(case: Case) -> dict[str, Any]:
        return {"chunks": divided(case.micro_batch_size()), "aux_coefficient": COEFFICIENT}

    directory = tmp_path_factory.mktemp("router")
    return PlainRuns(directory, dataset, MODELS, CASES, plain_of=plain_of)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
