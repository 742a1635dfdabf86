"""MLPs computed in tiles of tokens train as plain transformers does, which computes them at once.

Adapters are in `test_adapters.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import CHUNKS, EPS, Case, PlainRuns
from tests.parity.conftest import SHARED_MOE, each_case, llama
from tests.parity.plain import divided
from tests.parity.test_ring import OF_EXPERTS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

AUXILIARY = 0.1
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    # Two inputs of the MLP, biases and the residual inside.
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 97,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "gpt_oss": OF_EXPERTS
    | {
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 10,
        "pad_token_id": 0,
    },
    "mixtral": OF_EXPERTS | {"model_type": "mixtral"},
    # Their router's loss is a mean over the tokens of a micro-batch.
    "balanced": OF_EXPERTS
    | {"model_type": "mixtral", "output_router_logits": True, "router_aux_loss_coef": AUXILIARY},
    "shared_moe": SHARED_MOE,
}


def tiled(size: int = 5, **model: Any) -> dict[str, Any]:
    """Sections of a run; `size` does not divide the tokens of a micro-batch."""
    return {**EPS, "model": {"tiled_mlp": size, **model}}


TILES = tiled()
ANEW = tiled(gradient_checkpointing="full")
CASES = [
    Case(2, "zero1", sections=TILES, slow=False),
    Case(2, "zero3", sections=ANEW),
    Case(2, "zero3", "shared_moe", sections=TILES),
    Case(2, "zero2", sections=TILES),
    Case(2, "zero3_offload", sections=TILES),
    *(Case(2, engine, "bloom", sections=TILES) for engine in ("zero0", "zero3")),
    Case(1, "zero1", sections=tiled(1)),
    Case(1, "zero1", accumulation=4, sections=tiled(32)),
    Case(2, "zero3", degrees={"tensor": 2}, sections=ANEW),
    Case(4, "zero3", degrees={"sequence": 2}, sections=TILES),
    Case(4, "zero3", degrees={"tensor": 2, "sequence": 2}, sections=tiled(**CHUNKS["model"])),
    Case(2, "pipeline_zero1", degrees={"pipeline": 2}, sections=ANEW),
    *(Case(2, engine, "gpt_oss", sections=TILES) for engine in ("zero1", "zero3")),
    Case(2, "zero1", "mixtral", degrees={"tensor": 2}, sections=TILES),
    Case(2, "zero1", "balanced", sections=TILES),
    Case(2, "zero3", "balanced", sections=ANEW),
    Case(2, "zero3", "mixtral", degrees={"expert": 2}, sections=ANEW),
    Case(4, "zero1", "mixtral", degrees={"expert": 2, "tensor": 2}, sections=TILES),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def plain_of(case: Case) -> dict[str, Any]:
        if case.model != "balanced":
            return {}
        return {"aux_coefficient": AUXILIARY, "chunks": divided(case.micro_batch_size())}

    directory = tmp_path_factory.mktemp("tiles")
    return PlainRuns(directory, dataset, MODELS, CASES, plain_of=plain_of)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
