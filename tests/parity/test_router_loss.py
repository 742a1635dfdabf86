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
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.parity.comparison import assert_same_steps
from tests.parity.conftest import ARCHITECTURES, SEED, STEPS, llama, run_config, train_cases
from tests.parity.plain import divided, plain_training
from tests.parity.test_zero_stages import LOSS, NORM

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WEIGHTS = 1e-5
COEFFICIENT = 0.5  # so that it shows
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
OPTIMIZER = {"lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6}  # see test_pipeline.optimizer_of
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

    @property
    def name(self) -> str:
        return f"{self.parallel}-{self.engine}-accumulation{self.accumulation}-{self.model}"

    @property
    def micro_batch_size(self) -> int:
        return 8 // (self.accumulation * (2 if self.parallel == "data" else 1))


CASES = [
    Case("zero1", 2, "mixtral"),
    Case("zero3", 1, "qwen3_moe", slow=True),
    Case("zero2", 2, "mixtral", "tensor"),
    Case("zero0", 2, "mixtral", "pipeline", "full"),
    Case("zero1", 4, "qwen3_moe", "pipeline", slow=True),
    Case("zero1", 2, "mixtral", "sequence"),
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


def train(dataset: Path, directory: Path, *, slow: bool) -> dict[str, Any]:
    jobs = {
        case.name: {
            "config": config_of(case, dataset),
            "deepspeed_config": case.engine,
            "save_at": STEPS,
            "save_to": str(directory / case.name),
        }
        for case in CASES
        if case.slow == slow
    }
    return {"results": train_cases(2, jobs, directory), "directory": directory}


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(dataset, tmp_path_factory.mktemp("router"), slow=False)


@pytest.fixture(scope="module")
def slow_trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(dataset, tmp_path_factory.mktemp("router_slow"), slow=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, values in MODELS.items():
        section = ModelSection(config=values)
        found[name] = tmp_path_factory.mktemp("hf") / name
        model = build_model(section, load_hf_config(section), seed=SEED)
        model.save_pretrained(found[name])
    return found


def compare(
    case: Case, dataset: Path, directories: dict[str, Path], trained: dict[str, Any]
) -> None:
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    expected = plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size),
        aux_coefficient=COEFFICIENT,
    )
    result = trained["results"][case.name]
    assert result["accumulation"] == case.accumulation
    # The loss that is reported is the cross-entropy alone.
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    weights = read_full_masters(trained["directory"] / case.name / "tensors")
    assert weights.keys() <= expected.weights.keys()
    assert sum(tensor.numel() for tensor in weights.values()) > 10_000
    for name, tensor in weights.items():
        assert float((tensor - expected.weights[name]).abs().max()) <= WEIGHTS, name


@pytest.mark.parametrize("case", [c for c in CASES if not c.slow], ids=lambda case: case.name)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: dict[str, Any]
) -> None:
    compare(case, dataset, directories, trained)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.slow], ids=lambda case: case.name)
def test_more_equal_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], slow_trained: dict[str, Any]
) -> None:
    compare(case, dataset, directories, slow_trained)
