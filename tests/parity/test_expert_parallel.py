"""Experts divided among ranks, against plain transformers and torch's AdamW in one process.

The reference has all experts and computes with transformers' own forward methods. The router's
choices are compared as well: a token sent elsewhere would show in the losses only a little.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.errors import ModelError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import try_model
from bigtrain.models.equivalence.tensor_parallel import check_tensor_size
from bigtrain.settings.run_config import ModelSection, RunConfig
from tests.parity.conftest import TrainedCases, each_case, run_config
from tests.parity.expert_models import (
    BIASES,
    COEFFICIENT,
    MODELS,
    OPTIMIZER,
    WEIGHTS,
    save_model,
)
from tests.parity.plain import divided, plain_training, read_steps
from tests.parity.routing import Choices, checksum, differing
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps, assert_same_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Case:
    """One point: so many ranks, of which `expert` divide the experts."""

    world_size: int
    expert: int
    engine: str
    model: str = "mixtral"
    accumulation: int = 2
    sequence: int = 1
    pipeline: int = 1
    tensor: int = 1
    checkpointing: str = "none"
    slow: bool = False

    @property
    def name(self) -> str:
        degrees = f"ep{self.expert}-of-{self.world_size}"
        inner = {"sp": self.sequence, "pp": self.pipeline, "tp": self.tensor}
        more = "".join(f"-{name}{size}" for name, size in inner.items() if size > 1)
        recompute = "" if self.checkpointing == "none" else "-recompute"
        return f"{degrees}{more}{recompute}-{self.engine}-{self.model}-{self.accumulation}"

    @property
    def micro_batch_size(self) -> int:
        replicas = self.world_size // (self.sequence * self.pipeline * self.tensor)
        return 8 // (self.accumulation * replicas)


CASES = [
    Case(2, 2, "zero0", slow=True),
    Case(2, 2, "zero1", "qwen3_moe", 1, slow=True),
    Case(2, 2, "zero3", "qwen3_moe", 4, slow=True),
    Case(1, 1, "zero0", "odd", 1, slow=True),
    Case(2, 2, "zero1", "odd", slow=True),
    Case(2, 1, "zero0", "odd", 1, tensor=2, slow=True),
    Case(2, 2, "zero0", "gpt_oss one", slow=True),
    Case(2, 2, "zero3", "gpt_oss odd", 1, checkpointing="full"),
    Case(2, 2, "zero1", "deepseek_v3", 1),
    Case(4, 2, "zero2", sequence=2, slow=True),
    Case(4, 4, "zero3", "gpt_oss", 1, slow=True),
    Case(4, 2, "pipeline_zero1", "some", pipeline=2, slow=True),
    Case(4, 2, "zero3", tensor=2, slow=True),
    Case(2, 2, "zero1", "glm4_moe", 1, slow=True),
    Case(2, 2, "zero2", "granitemoehybrid", 1, slow=True),
    Case(2, 2, "zero1", "jamba", 1, slow=True),
    Case(2, 2, "zero2", checkpointing="full", slow=True),
    Case(2, 2, "zero3", "dbrx", checkpointing="full", slow=True),
    Case(4, 2, "zero2", "dbrx", sequence=2, slow=True),
    Case(4, 2, "pipeline_zero1", "dbrx", pipeline=2, slow=True),
    Case(4, 4, "zero0", "dbrx", 1, slow=True),
    Case(2, 2, "zero3", "deepseek_v3", slow=True),
    Case(4, 2, "pipeline_zero1", "deepseek_v3", pipeline=2, slow=True),
    Case(4, 2, "zero1", "deepseek_v3", tensor=2, slow=True),
    Case(4, 2, "zero2", "deepseek_v3", sequence=2, slow=True),
    Case(4, 4, "zero0", "deepseek_v3", checkpointing="full", slow=True),
    *(Case(2, 2, f"zero{z}", "glm4_moe", slow=True) for z in (1, 3)),
    Case(4, 2, "zero2", "glm4_moe", 1, tensor=2, slow=True),
    Case(4, 2, "pipeline_zero1", "glm4_moe", pipeline=2, checkpointing="full", slow=True),
    Case(4, 2, "zero3", "glm4_moe", sequence=2, slow=True),
    Case(4, 4, "zero0", "glm4_moe", slow=True),
    *(Case(2, 2, f"zero{z}", "granitemoehybrid", slow=True) for z in (1, 3)),
    Case(4, 2, "zero3", "granitemoehybrid", tensor=2, slow=True),
    Case(4, 2, "pipeline_zero1", "granitemoehybrid", pipeline=2, slow=True),
    Case(4, 4, "zero0", "granitemoehybrid", 1, checkpointing="full", slow=True),
    Case(2, 2, "zero3", "jamba", slow=True),
    Case(4, 2, "zero1", "jamba", tensor=2, slow=True),
    Case(4, 2, "zero0", "jamba", pipeline=2, checkpointing="full", slow=True),
    Case(4, 4, "zero2", "jamba", 1, slow=True),
    Case(2, 2, "zero1", "gpt_oss", slow=True),
    Case(4, 4, "zero2", "gpt_oss", slow=True),
    Case(4, 2, "pipeline_zero1", "gpt_oss", pipeline=2, checkpointing="full", slow=True),
    Case(2, 2, "zero2", "gpt_oss odd", slow=True),
    Case(2, 2, "zero1", "gpt_oss", sequence=2, slow=True),
    Case(4, 4, "zero2", "qwen3_moe", slow=True),
    Case(4, 2, "pipeline_zero1", "qwen3_moe", pipeline=2, slow=True),
    Case(2, 2, "zero3", sequence=2, slow=True),
    Case(4, 2, "pipeline_zero1", pipeline=2, accumulation=4, slow=True),
    Case(4, 2, "zero0", "some", pipeline=2, checkpointing="full", slow=True),
    *(Case(4, 2, f"zero{z}", "qwen3_moe", tensor=2, slow=True) for z in range(4)),
    *(Case(4, e, f"zero{z}", slow=True) for e in (2, 4) for z in range(4)),
    *(Case(4, 4, f"zero{z}", sequence=2, slow=True) for z in range(4)),
    *(Case(2, 2, f"zero{z}", "qwen3_moe", sequence=2, slow=True) for z in range(3)),
    *(Case(2, 2, f"zero{z}", "gpt_oss one", 1, slow=True) for z in (1, 2, 3)),
    Case(4, 4, "zero3", "gpt_oss one", 2, checkpointing="full", slow=True),
]


def config_of(case: Case, data: Path, directories: dict[str, Path]) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directories[case.model]), "gradient_checkpointing": case.checkpointing},
        micro_batch_size=case.micro_batch_size,
        parallel={
            "expert": case.expert,
            "sequence": case.sequence,
            "pipeline": case.pipeline,
            "tensor": case.tensor,
        },
        optimizer=OPTIMIZER,
    )
    return config


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(
        tmp_path_factory.mktemp("experts"),
        CASES,
        lambda case: config_of(case, dataset, directories),
        lambda _: {"watch_routing": True},
    )


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_model(name, tmp_path_factory.mktemp("hf") / name) for name in MODELS}


@each_case(CASES)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    choices: list[Choices] = []
    expected = plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size),
        aux_coefficient=COEFFICIENT if "output_router_logits" in MODELS[case.model] else 0.0,
        watch=lambda model: choices.append(Choices(model)),
        experts="eager" if case.model == "odd" else "grouped_mm",
    )
    result, place = trained.of(case)
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    samples = [[checksum(row) for row in s.inputs] for s in read_steps(dataset, config)]
    chosen = choices[0].of_one(samples)
    assert differing(result["choices"], chosen) == {}
    assert result["choices"]["times"] == case.tensor * (1 if case.checkpointing == "none" else 2)
    if case.model == "gpt_oss one":
        assert all(row == [2] for rows in chosen["experts"].values() for row in rows)
    bias = "e_score_correction_bias"
    weights = assert_same_weights(place, expected.weights, limit=WEIGHTS, buffers=bias)
    biases = [name for name in weights if name.endswith(bias)]
    for name in biases:
        assert torch.equal(weights[name], BIASES[: weights[name].numel()])
    assert bool(biases) == (case.model in ("deepseek_v3", "glm4_moe"))


REFUSED = {  # what the models above are not trained with, and what a run says to it
    ("granitemoehybrid", "sequence"): "it mixes tokens outside attention",
    ("jamba", "sequence"): "it mixes tokens outside attention",
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "axis"), REFUSED)
def test_what_a_model_cannot_have_is_refused(model: str, axis: str) -> None:
    config = RunConfig.model_validate(
        run_config(
            Path("unread"),
            {"config": MODELS[model]},
            micro_batch_size=1,
            parallel={"expert": 2, axis: 2},
        )
    )
    problems, _, _ = try_model(config, load_hf_config(config.model))
    assert [problem.key for problem in problems] == [f"parallel.{axis}"]
    assert REFUSED[model, axis] in problems[0].rule


def test_no_tensor_parallel_plan_is_refused() -> None:
    hf_config = load_hf_config(ModelSection(config=MODELS["gpt_oss"]))
    with pytest.raises(ModelError, match="no tensor-parallel plan for model_type gpt_oss"):
        check_tensor_size(hf_config, 2)
