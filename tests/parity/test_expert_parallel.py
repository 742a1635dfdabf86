"""Experts divided among ranks, against plain transformers and torch's AdamW in one process.

The reference has all experts and computes with transformers' own forward methods. The router's
choices are compared as well: a token sent elsewhere would show in the losses only a little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.errors import ModelError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.tensor_parallel import check_tensor_size
from bigtrain.settings.run_config import ModelSection
from tests.parity.cases import (
    CHUNKS,
    EPS,
    ISOLATED,
    RECOMPUTE,
    Case,
    PlainRuns,
    assert_among,
)
from tests.parity.conftest import SavedModels, each_case
from tests.parity.expert_models import BIASES, COEFFICIENT, MODELS, set_biases
from tests.parity.plain import Spread, divided, orders, read_steps
from tests.parity.routing import Choices, checksum, differing

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]


def divide(
    world_size: int,
    expert: int,
    engine: str,
    model: str = "mixtral",
    accumulation: int = 2,
    more: Mapping[str, Any] = EPS,
    slow: bool = True,
    dtype: str = "float32",
    **degrees: int,
) -> Case:
    """Return a case of so many ranks, of which `expert` divide the experts."""
    divided_by = ({"expert": expert} if expert > 1 else {}) | degrees
    return Case(world_size, engine, model, accumulation, divided_by, more, dtype, slow)


ANEW = EPS | RECOMPUTE
BESIDES = EPS | ISOLATED | CHUNKS
BESIDES_ANEW = BESIDES | {"model": {**CHUNKS["model"], **RECOMPUTE["model"]}}
FROZEN = EPS | {"model": {"frozen": ["model.layers.2.mlp.experts.*"]}}
CASES = [
    divide(2, 2, "zero3", "gpt_oss odd", 1, ANEW, slow=False),
    divide(2, 2, "zero1", "deepseek_v3", 1),
    divide(1, 1, "zero0", "odd", 1),
    divide(2, 2, "zero1", "odd"),
    divide(2, 1, "zero0", "odd", 1, tensor=2),
    divide(2, 2, "zero0", "gpt_oss one"),
    divide(4, 4, "zero3", "gpt_oss one", 2, ANEW),
    divide(4, 4, "zero3", "gpt_oss", 1),
    divide(4, 2, "pipeline_zero1", "gpt_oss", more=ANEW, pipeline=2),
    divide(4, 2, "pipeline_zero1", "some", pipeline=2),
    divide(4, 2, "zero0", "some", more=ANEW, pipeline=2),
    divide(2, 2, "zero3", "dbrx", more=ANEW),
    divide(4, 2, "zero2", "dbrx", sequence=2),
    divide(4, 2, "pipeline_zero1", "dbrx", pipeline=2),
    divide(4, 2, "zero1", "deepseek_v3", tensor=2),
    divide(4, 2, "pipeline_zero1", "deepseek_v3", pipeline=2),
    divide(4, 4, "zero0", "deepseek_v3", more=ANEW),
    divide(4, 2, "zero2", "glm4_moe", 1, tensor=2),
    divide(2, 2, "zero2", "granitemoehybrid", 1),
    divide(2, 2, "zero3", "jamba"),
    divide(4, 2, "zero1", "jamba", tensor=2),
    divide(4, 2, "zero1", "jamba", sequence=2),
    divide(4, 2, "zero3", "granitemoehybrid", sequence=2),
    divide(4, 2, "zero0", "jamba", more=ANEW, pipeline=2),
    divide(4, 2, "zero2", "jamba", sequence=2),
    divide(4, 2, "zero1", "granitemoehybrid", sequence=2),
    divide(4, 2, "zero1", "granitemoehybrid", tensor=2),
    divide(4, 2, "zero3", "qwen3_next", tensor=2),
    divide(4, 2, "zero1", "qwen3_5_moe", tensor=2),
    divide(4, 2, "zero2", "nemotron_h", tensor=2),
    divide(4, 2, "zero3", "qwen3_moe", tensor=2),
    divide(4, 2, "zero2", sequence=2),
    *(divide(4, 4, f"zero{stage}") for stage in (0, 2)),
    divide(4, 4, "zero1", sequence=2),
    divide(4, 4, "zero3", sequence=2),
    divide(2, 2, "zero2_offload", "unrouted"),
    divide(2, 2, "zero3", "unrouted", more=BESIDES),
    *(divide(2, 2, f"zero{stage}", "unrouted", more=FROZEN) for stage in (1, 3)),
    divide(4, 2, "zero2_offload", "unrouted", more=BESIDES_ANEW, tensor=2),
    divide(4, 2, "zero1_offload", "unrouted", more=BESIDES_ANEW, pipeline=2),
    divide(4, 2, "zero3_offload", "unrouted", more=BESIDES_ANEW, sequence=2),
]
# The first of two stages has no experts.
IN_16_BIT = [
    divide(2, 2, "zero1", "unrouted", dtype="bfloat16"),
    divide(2, 2, "zero2", "unrouted", dtype="bfloat16"),
    divide(4, 2, "pipeline_zero1", "unrouted", dtype="bfloat16", pipeline=2),
    divide(4, 2, "zero3", "unrouted", dtype="bfloat16", tensor=2),
    divide(4, 2, "zero3", "unrouted", dtype="bfloat16", sequence=2),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def plain_of(case: Case) -> dict[str, Any]:
        is_routed = "output_router_logits" in MODELS[case.model]
        return {
            "chunks": divided(case.micro_batch_size()),
            "aux_coefficient": COEFFICIENT if is_routed else 0.0,
            "experts": "eager" if case.model == "odd" else "grouped_mm",
            "frozen": r"model\.layers\.2\.mlp\.experts" if case.sections == FROZEN else "nothing",
        }

    return PlainRuns(
        tmp_path_factory.mktemp("experts"),
        dataset,
        MODELS,
        [*CASES, *IN_16_BIT],
        directories=SavedModels(MODELS, tmp_path_factory.mktemp("hf"), set_biases),
        from_files=True,
        plain_of=plain_of,
        watch_routing=True,
    )


@each_case(CASES)
def test_equals_plain_training(case: Case, dataset: Path, runs: PlainRuns) -> None:
    choices: list[Choices] = []
    result, weights = runs.check(case, watch=lambda model: choices.append(Choices(model)))
    steps = read_steps(dataset, runs.config_of(case))
    chosen = choices[0].of_one([[checksum(row) for row in step.inputs] for step in steps])
    assert differing(result["choices"], chosen) == {}
    times = 2 if "gradient_checkpointing" in case.sections.get("model", {}) else 1
    assert result["choices"]["times"] == case.degrees.get("tensor", 1) * times
    if case.model == "gpt_oss one":
        assert all(row == [2] for rows in chosen["experts"].values() for row in rows)
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    for name in biases:
        assert torch.equal(weights[name], BIASES[: weights[name].numel()])
    assert bool(biases) == (case.model in ("deepseek_v3", "glm4_moe", "nemotron_h"))


@pytest.fixture(scope="module")
def spread(runs: PlainRuns) -> Spread:
    """Of plain runs in bfloat16 that divide the samples otherwise."""
    case = replace(IN_16_BIT[0], dtype="float32")
    return Spread.of([runs.plain(case, chunks=chunks, dtype=torch.bfloat16) for chunks in orders()])


@each_case(IN_16_BIT)
def test_16_bit_is_among_plain_runs(case: Case, runs: PlainRuns, spread: Spread) -> None:
    """Norms above all: each of DeepSpeed's optimizers adds those of experts up in its own way."""
    result, place = runs.trained(case)
    assert_among(result, read_full_masters(place / "tensors"), spread)


def test_no_tensor_parallel_plan_is_refused() -> None:
    hf_config = load_hf_config(ModelSection(config=MODELS["gpt_oss"]))
    with pytest.raises(ModelError, match="no tensor-parallel plan for model_type gpt_oss"):
        check_tensor_size(hf_config, 2)
