"""Adapters of attention and MLPs in many architectures, against plain peft in one process.

Each has something that others have not: experts that are stacked this way or that, or not marked as
such, layers that peft takes for experts', fused or odd projections, layers without attention.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from bigtrain.models.build import empty_model
from bigtrain.models.layers.adapters import file_config
from bigtrain.settings.run_config import AdaptersSection
from tests.parity.cases import ISOLATED, LOSS, NORM, WEIGHTS, Case
from tests.parity.conftest import STEPS, train_cases
from tests.parity.plain import plain_training
from tests.parity.test_adapters import config_of, pytestmark, seed_of
from tools.tiny_models import tiny_model

__all__ = ["pytestmark"]

SECTION = {"rank": 2, "alpha": 8, "targets": ["attention", "mlp"]}
# With 1e-6, plain runs of lfm2_moe that divide samples otherwise part by 1e-5 in one weight.
LARGER_EPS: dict[str, Any] = {"optimizer": {"eps": 1e-5}}
CUT = ["mixtral", "deepseek_v3", "llama4_text", "gemma3_text", "gpt_neox", "qwen3_next", "phimoe"]
CUT += ["hunyuan_v1_moe", "minimax", "jamba", "lfm2_moe", "kimi_linear", "granitemoe"]
WHOLE = ["gpt_oss", "falcon", "bloom", "jetmoe"]
CASES = {name: Case(2, "zero3", degrees={"tensor": 2}, sections=LARGER_EPS) for name in CUT}
CASES |= {name: Case(2, "zero3", sections=LARGER_EPS) for name in WHOLE}
# On the projections of recurrent layers, with documents that share the samples of two ranks.
RECURRENT = {"qwen3_5_text": "zero3", "bamba": "zero1", "lfm2": "zero2"}
CASES |= {
    name: Case(2, engine, degrees={"sequence": 2}, sections=LARGER_EPS | ISOLATED)
    for name, engine in RECURRENT.items()
}


def section_of(name: str) -> dict[str, Any]:
    return SECTION | ({"targets": "all-linear"} if name in RECURRENT else {})


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("architectures")
    for name in CASES:
        model = tiny_model(name)
        for noise in ("dropout", "output_router_logits"):
            if hasattr(model.config, noise):
                setattr(model.config, noise, type(getattr(model.config, noise))(0))
        model.save_pretrained(root / name)
    return {name: root / name for name in CASES}


def config(name: str, data: Path, base: Path) -> dict[str, Any]:
    return config_of(CASES[name], data, base, adapters=section_of(name))


@pytest.fixture(scope="module")
def trained(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("trained")
    jobs = {
        name: {
            "config": config(name, dataset, bases[name]),
            "deepspeed_config": case.engine,
            "weights": {str(STEPS): str(place / f"{name}.pt")},
        }
        for name, case in CASES.items()
    }
    results_by_case = train_cases(2, jobs, place)
    return {n: results_by_case[n] | {"weights": torch.load(place / f"{n}.pt")} for n in jobs}


def adapted(section: dict[str, Any], model: Any) -> Any:
    """Plain peft's, of the configuration that an exported directory would have."""
    told: Any = file_config(empty_model(model.config), AdaptersSection.model_validate(section))
    config = LoraConfig(
        r=told.r,
        lora_alpha=told.lora_alpha,
        target_modules=list(told.target_modules),
        target_parameters=told.target_parameters,
        task_type="CAUSAL_LM",
    )
    made = get_peft_model(model, config, autocast_adapter_dtype=False)
    for layer, module in made.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            torch.manual_seed(seed_of(layer))
            module.float().reset_lora_parameters("default", True)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_peft(
    name: str, dataset: Path, bases: dict[str, Path], trained: dict[str, Any]
) -> None:
    result = trained[name]
    expected = plain_training(
        dataset,
        bases[name],
        config(name, dataset, bases[name]),
        adapt=partial(adapted, section_of(name)),
        frozen=r"(?!.*\.lora_)",
    )
    assert result["losses"] == pytest.approx(expected.losses, abs=LOSS["float32"])
    assert result["norms"] == pytest.approx(expected.norms, rel=NORM["float32"])
    assert expected.losses[-1] < expected.losses[0]
    for full_name, weight in expected.weights.items():
        own = result["weights"][full_name.removeprefix("base_model.model.")]
        assert float((own - weight).abs().max()) <= WEIGHTS, full_name
