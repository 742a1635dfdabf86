"""Models of attention and recurrent layers train as one process does that passes each document
separately: in samples that documents share, divided among ranks, in stages, recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import EPS, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import VOCAB_SIZE, each_case

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

LENGTH, SAMPLES = 48, 4
ISOLATED, CONCATENATED = "isolated", "concatenated"
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5": COMMON
    | {
        "model_type": "qwen3_5_text",
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "bamba": COMMON
    | {
        "model_type": "bamba",
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "mamba_n_groups": 1,
    },
    "jamba": COMMON
    | {
        "model_type": "jamba",
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
    },
    "lfm2": COMMON | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
}


def hybrid(
    world_size: int,
    engine: str,
    model: str,
    data: str = ISOLATED,
    more: Mapping[str, Any] = {},
    accumulation: int = 1,
    slow: bool = True,
    **degrees: Any,
) -> Case:
    sections = {"data": {"path": data}, **EPS, **more}
    return Case(world_size, engine, model, accumulation, degrees, sections, "float32", slow)


RING = {"ulysses": 1, "ring": 2}
# Every kind of layer, stage of ZeRO and degree with others.
CASES = [
    hybrid(2, "zero0", "qwen3_5", more=RECOMPUTE, accumulation=2),
    hybrid(2, "zero2", "bamba", more=RECOMPUTE),
    hybrid(2, "zero3", "jamba", more=RECOMPUTE, slow=False),
    hybrid(2, "zero1", "lfm2"),
    hybrid(2, "zero1", "qwen3_5", pipeline=2, more=RECOMPUTE, accumulation=2, slow=False),
    hybrid(2, "zero1", "bamba", pipeline=2, accumulation=2),
    hybrid(2, "zero1", "qwen3_5", tensor=2),
    hybrid(2, "zero3", "qwen3_5", sequence=2, more=RECOMPUTE, slow=False),
    hybrid(2, "zero1", "bamba", sequence=RING),
    hybrid(2, "zero1", "jamba", sequence=2, data=CONCATENATED, more=RECOMPUTE),
    hybrid(2, "zero2", "lfm2", sequence=RING, data=CONCATENATED),
    hybrid(4, "zero1", "bamba", sequence=4),
    hybrid(4, "zero3", "jamba", sequence={"ulysses": 2, "ring": 2}, more=RECOMPUTE),
    hybrid(4, "zero2", "qwen3_5", sequence=2, accumulation=2, more=RECOMPUTE),
    hybrid(4, "zero1", "qwen3_5", sequence=2, tensor=2),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def config_of(case: Case, model: Mapping[str, Any]) -> dict[str, Any]:
        config = case.config(dataset, model, SAMPLES)
        config["batch"] |= {"sequence_length": LENGTH, "global_batch_size": SAMPLES}
        kind = config["data"]["path"]
        config["data"] = {"path": str(dataset)}
        if kind == CONCATENATED:
            config["data"]["mask_end_of_document"] = True
        else:
            config["data"]["document_boundaries"] = "isolate"
        return config

    directory = tmp_path_factory.mktemp("hybrid")
    return PlainRuns(directory, dataset, MODELS, CASES, config_of=config_of)


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)
