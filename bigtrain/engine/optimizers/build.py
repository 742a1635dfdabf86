"""The optimizer of a run: its update rules, attached to DeepSpeed's masters."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from bigtrain.engine.deepspeed_patches.optimizers import inner_optimizer
from bigtrain.engine.optimizers.masters import master_parts
from bigtrain.engine.optimizers.state_dtype import StateDtype
from bigtrain.engine.optimizers.update_rule import RuleInputs, RuleOptimizer, UpdateRule
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.settings.run_config import OptimizerSection
from bigtrain.settings.sections.optimizer_facts import facts_of_optimizer

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
    inputs = RuleInputs(section, dtype, model, mesh, device)
    names = [section.type] if section.facts.beside is None else [section.type, section.facts.beside]
    rules = {name: rule_class(name).of(inputs) for name in names}
    return lambda groups: RuleOptimizer(groups, rules, section.lr, dtype)


def rule_class(name: str) -> type[UpdateRule]:
    """The update rule of ``optimizer.type`` = `name`: of the module that the table names."""
    found: type[UpdateRule] = import_module(facts_of_optimizer(name).module).RULE
    return found


def attach_optimizer(engine: Any, model: nn.Module) -> None:
    """Tell an optimizer of ours where DeepSpeed keeps the masters of `model`. Collective over the
    ranks that hold the same stage."""
    optimizer = inner_optimizer(engine)
    if isinstance(optimizer, RuleOptimizer):
        optimizer.attach(list(master_parts(engine, model)))
