"""The optimizer of a run: its update rules, attached to DeepSpeed's masters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bigtrain.engine.deepspeed_patches.optimizers import inner_optimizer
from bigtrain.engine.optimizers.adafactor import Adafactor
from bigtrain.engine.optimizers.adamw import AdamW
from bigtrain.engine.optimizers.lion import Lion
from bigtrain.engine.optimizers.masters import master_parts
from bigtrain.engine.optimizers.muon import Muon
from bigtrain.engine.optimizers.state_dtype import StateDtype
from bigtrain.engine.optimizers.update_rule import RuleOptimizer, UpdateRule
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.settings.run_config import OptimizerSection

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""From parameter groups; what `deepspeed.initialize` takes as `optimizer`."""


def optimizer_maker(
    section: OptimizerSection, model: nn.Module, mesh: Mesh, device: torch.device
) -> MakeOptimizer | None:
    """The function that makes the optimizer from `parameter_groups`; None if DeepSpeed makes it by
    its JSON. Collective over all ranks. Raises ConfigError for settings that do not fit the
    model."""
    if not section.is_own:
        return None
    dtype = StateDtype(section.state_dtype)
    rules: dict[str, UpdateRule] = {"adamw": AdamW(section.betas, section.eps, dtype)}
    if section.type == "lion":
        rules = {"lion": Lion(section.betas, dtype)}
    if section.type == "adafactor":
        rules = {"adafactor": Adafactor(section.adafactor, model, mesh, device)}
    if section.type == "muon":
        rules["muon"] = Muon(section.muon, dtype, model, mesh, device)
    return lambda groups: RuleOptimizer(groups, rules, section.lr)


def attach_optimizer(engine: Any, model: nn.Module) -> None:
    """Tell an optimizer of ours where DeepSpeed keeps the masters of `model`. Collective over the
    ranks that hold the same stage."""
    optimizer = inner_optimizer(engine)
    if isinstance(optimizer, RuleOptimizer):
        optimizer.attach(list(master_parts(engine, model)))
