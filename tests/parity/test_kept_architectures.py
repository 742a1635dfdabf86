"""Every architecture that keeps parameters in float32, in bfloat16, compared with plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.build import empty_model
from bigtrain.models.layers.parameter_roles import parameter_roles
from bigtrain.models.transformers_patches import computed_in_float32
from tests.parity.conftest import run_config, train_and_save
from tests.parity.plain import Spread, adamw, orders, plain_training
from tools.tiny_models import tiny_config, tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]

KEEPING = (
    "bailing_hybrid",
    "beam",
    "deepseek_v4",
    "ernie4_5_moe",
    "flint",
    "hy_v4",
    "inkling2_text",
    "inkling_text",
)
LOSS = 2e-3


@dataclass(frozen=True)
class Case:
    model: str
    engine: str
    world_size: int = 2

    @property
    def name(self) -> str:
        return f"{self.model}-{self.engine}"


CASES = [Case(model, engine) for model in KEEPING for engine in ("zero0", "zero1", "zero3")]


def config_of(case: Case, data: Path, directories: dict[str, Path]) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data, {"path": str(directories[case.model])}, micro_batch_size=4
    )
    return config | {"precision": {"dtype": "bfloat16"}}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories_by_name = {}
    for name in KEEPING:
        directories_by_name[name] = tmp_path_factory.mktemp("hf") / name
        model: Any = tiny_model(name)
        model.config.output_router_logits = False  # without an auxiliary loss
        model.save_pretrained(directories_by_name[name])
    return directories_by_name


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return train_and_save(
        CASES,
        lambda case: config_of(case, dataset, directories),
        tmp_path_factory.mktemp("kept"),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trains_as_plain_pytorch(
    case: Case, dataset: Path, directories: dict[str, Path], trained: dict[str, Any]
) -> None:
    model = empty_model(tiny_config(case.model), torch.bfloat16)
    assert computed_in_float32(model, torch.bfloat16)
    roles = parameter_roles(model)

    def optimizer_of(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Any:
        exempt = [p for name, p in masters.items() if not roles[name].role.decays()]
        return adamw(list(masters.values()), section, exempt)

    # Plain runs that add up in different orders diverge too, where a choice of experts flips.
    runs = [
        plain_training(
            dataset,
            directories[case.model],
            config_of(case, dataset, directories),
            chunks=chunks,
            dtype=torch.bfloat16,
            exact_masters=True,
            optimizer_of=optimizer_of,
        )
        for chunks in orders()
    ]
    spread = Spread.of(runs)
    result = trained["results"][case.name]
    assert result["losses"][0] == pytest.approx(spread.losses[0], abs=LOSS)
    assert result["losses"] == pytest.approx(spread.losses, abs=LOSS + 3 * spread.loss)
    weights = read_full_masters(trained["directory"] / case.name / "tensors")
    for name, tensor in spread.weights.items():
        assert torch.isfinite(weights[name]).all(), name
        assert weights[name].shape == tensor.shape
