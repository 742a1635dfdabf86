"""Every architecture that keeps parameters in float32, in bfloat16, compared with plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.build import empty_model
from bigtrain.models.layers.parameter_roles import parameter_roles
from bigtrain.models.transformers_patches import computed_in_float32
from tests.parity.cases import LOSS, Case, PlainRuns
from tests.parity.conftest import each_case
from tests.parity.plain import Spread, adamw, orders
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
ENGINES = ("zero3", "zero1", "zero0")
CASES = [
    Case(2, ENGINES[number % 3], model, 1, dtype="bfloat16") for number, model in enumerate(KEEPING)
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    directories = {}
    for name in KEEPING:
        directories[name] = tmp_path_factory.mktemp("hf") / name
        model: Any = tiny_model(name)
        model.config.output_router_logits = False  # without an auxiliary loss
        model.save_pretrained(directories[name])
    place = tmp_path_factory.mktemp("kept")
    return PlainRuns(
        place,
        dataset,
        {name: {} for name in KEEPING},
        CASES,
        directories=directories,
        from_files=True,
    )


@each_case(CASES)
def test_trains_as_plain_pytorch(case: Case, runs: PlainRuns) -> None:
    model = empty_model(tiny_config(case.model), torch.bfloat16)
    assert computed_in_float32(model, torch.bfloat16)
    roles = parameter_roles(model)

    def optimizer_of(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Any:
        exempt = [p for name, p in masters.items() if not roles[name].role.decays()]
        return adamw(list(masters.values()), section, exempt)

    # Plain runs that add up in different orders diverge too, where a choice of experts flips.
    options = {"dtype": torch.bfloat16, "exact_masters": True, "optimizer_of": optimizer_of}
    spread = Spread.of([runs.plain(case, chunks=chunks, **options) for chunks in orders()])
    result, place = runs.trained(case)
    loss = LOSS["bfloat16"]
    assert result["losses"][0] == pytest.approx(spread.losses[0], abs=loss)
    assert result["losses"] == pytest.approx(spread.losses, abs=loss + 3 * spread.loss)
    weights = read_full_masters(place / "tensors")
    for name, tensor in spread.weights.items():
        assert torch.isfinite(weights[name]).all(), name
        assert weights[name].shape == tensor.shape
