"""Which parameters are in which group of an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from bigtrain.engine.optimizers.build import parameter_groups
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.parameter_plan import find_gradient_reach
from bigtrain.settings.run_config import AdaptersSection, ModelSection, OptimizerSection
from bigtrain.settings.sections.optimizer import OPTIMIZERS
from tests.parity.conftest import COMPOSITE, llama


@pytest.fixture(scope="module")
def adapted() -> tuple[Any, tuple[str, ...]]:
    """A model with adapters, and the weights that text gives no gradient."""
    section = ModelSection(config=COMPOSITE)
    hf_config = load_hf_config(section)
    adapters = AdaptersSection(rank=2, targets=["*_proj"])
    untrained = find_gradient_reach(hf_config, 32).absent or ()
    return build_model(section, hf_config, seed=0, adapters=adapters), untrained


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_loraplus_groups_are_those_of_peft(kind: str) -> None:
    """peft's own optimizer, of a model with vectors and a copied norm and head."""
    section = ModelSection(config=llama(tie_word_embeddings=False))
    adapters = AdaptersSection(
        rank=2,
        targets=["*_proj"],
        dora=True,
        modules_to_save=["norm", "lm_head"],
        loraplus_lr_ratio=16.0,
    )
    model: Any = build_model(section, load_hf_config(section), seed=0, adapters=adapters)
    optimizer = OptimizerSection(type=kind, lr=1e-3, weight_decay=0.1)
    groups = parameter_groups(model, optimizer, 1, (), adapters)
    ratios = {
        id(parameter): group.get("lr_ratio", 1.0)
        for group in groups
        for parameter in group["params"]
    }
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=16.0)
    assert ratios == {id(p): group["lr"] for group in theirs.param_groups for p in group["params"]}
    assert set(ratios.values()) == {1.0, 16.0}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_adapters_without_a_gradient_never_decay(
    kind: str, adapted: tuple[Any, tuple[str, ...]]
) -> None:
    """DeepSpeed gives them gradients of zeros, by which only weight decay changes anything."""
    model, untrained = adapted
    optimizer = OptimizerSection(type=kind, lr=1e-3, weight_decay=0.1)
    groups = parameter_groups(model, optimizer, 1, untrained)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decay: dict[bool, set[float]] = {False: set(), True: set()}
    for group in groups:
        for parameter in group["params"]:
            decay["vision_tower" in names[id(parameter)]].add(group["weight_decay"])
    assert decay == {False: {0.1}, True: {0.0}}
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped})
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p.requires_grad}
