"""Optimizer of a run: its update rules, attached to DeepSpeed's masters, and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

import torch
from torch import nn

from bigtrain.engine.deepspeed_patches.experts import as_expert_group, name_of_experts
from bigtrain.engine.deepspeed_patches.optimizers import inner_optimizer
from bigtrain.engine.optimizers.masters import master_parts
from bigtrain.engine.optimizers.update_rule import RuleInputs, RuleOptimizer, UpdateRule
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.layers.adapter_names import learns_faster
from bigtrain.models.layers.parameter_roles import adapted_weight, split_by_decay
from bigtrain.models.layers.parameters import parameter_of
from bigtrain.models.parallel.sharding import full_shape, is_expert
from bigtrain.settings.run_config import AdaptersSection, OptimizerSection
from bigtrain.settings.sections.optimizer import facts_of_optimizer

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""From parameter groups; what `deepspeed.initialize` takes as `optimizer`."""


def optimizer_maker(
    section: OptimizerSection, model: nn.Module, mesh: Mesh, device: torch.device
) -> MakeOptimizer | None:
    """Return the function that makes the optimizer from `parameter_groups`; None if DeepSpeed makes
    it by its JSON. Collective over all ranks. Raises ConfigError for settings that do not fit the
    model."""
    if not section.is_own:
        return None
    dtype: torch.dtype = getattr(torch, section.state_dtype)
    inputs = RuleInputs(section, dtype, model, mesh, device)
    names = [section.type, *section.facts.names]
    rules = {name: rule_class(name).of(inputs) for name in names}
    decay = None if section.ema is None else section.ema.decay
    return lambda groups: RuleOptimizer(groups, rules, section.lr, dtype, decay)


def rule_class(name: str) -> type[UpdateRule]:
    """Return the update rule of ``optimizer.type`` = `name`: of the module that the table names."""
    rule: type[UpdateRule] = import_module(facts_of_optimizer(name).module).RULE
    return rule


def attach_optimizer(engine: Any, model: nn.Module) -> None:
    """Give an optimizer of bigtrain the masters of `model` that DeepSpeed holds. Collective over
    the ranks of a stage."""
    optimizer = inner_optimizer(engine)
    if isinstance(optimizer, RuleOptimizer):
        optimizer.attach(list(master_parts(engine, model)))


def parameter_groups(
    model: nn.Module,
    section: OptimizerSection,
    expert_size: int,
    untrained: Collection[str] = (),
    adapters: AdaptersSection | None = None,
) -> list[dict[str, Any]]:
    """Return groups with and without weight decay, in this order, and of hidden matrices if the
    optimizer updates only hidden matrices, or of small parameters if it updates no small
    parameters; then groups with the learning rate of LoRA+, one per group so far, if
    `adapters` has its ratio; then groups of experts, one per group so far, if `expert_size` ranks
    divide experts. Any group may be empty. `untrained`: as in `split_by_decay`."""
    split = split_by_decay(model, decay_embeddings=section.decay_embeddings, untrained=untrained)
    groups: list[dict[str, Any]] = [
        {"params": split.decay, "weight_decay": section.weight_decay, "name": "decay"},
        {"params": split.no_decay, "weight_decay": 0.0, "name": "no_decay"},
    ]
    if section.is_own:
        for group in groups:
            group["rule"] = section.facts.beside or section.type
    if section.facts.beside is not None:
        from bigtrain.models.parallel.hidden_matrices import hidden_matrices

        # Hidden matrices leave their groups. Adapters of weights that get no gradient stay in the
        # group without decay: torch skips them.
        matrix_ids = {
            id(parameter_of(model, name))
            for name in hidden_matrices(model)
            if adapted_weight(name) not in untrained
        }
        matrices = [p for group in groups for p in group["params"] if id(p) in matrix_ids]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in matrix_ids]
        settings = section.own_settings
        decay, lr = getattr(settings, "weight_decay", None), getattr(settings, "lr", None)
        row = {
            "params": matrices,
            "weight_decay": section.weight_decay if decay is None else decay,
            "name": "matrices",
            "rule": section.type,
            "lr_ratio": 1.0 if lr is None else lr / section.lr,
        }
        groups.append(row)
    if section.facts.small is not None:
        # Parameters with few elements have another optimizer: they leave their groups.
        for group in groups[:]:
            limit = section.facts.min_elements
            small = [p for p in group["params"] if math.prod(full_shape(p)) < limit]
            small_ids = {id(parameter) for parameter in small}
            group["params"] = [p for p in group["params"] if id(p) not in small_ids]
            row = {"params": small, "name": f"small_{group['name']}", "rule": section.facts.small}
            groups.append({**group, **row})
    if adapters is not None and adapters.loraplus_lr_ratio is not None:
        # LoRA+ (Hayou et al. 2024, arXiv 2402.12354): B and vectors learn faster than A.
        names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in groups[:]:
            fast = [p for p in group["params"] if learns_faster(names_by_id[id(p)], full_shape(p))]
            fast_ids = {id(parameter) for parameter in fast}
            group["params"] = [p for p in group["params"] if id(p) not in fast_ids]
            row = {"params": fast, "name": f"loraplus_{group['name']}"}
            groups.append({**group, **row, "lr_ratio": adapters.loraplus_lr_ratio})
    # Experts that ranks divide: DeepSpeed reduces their gradients over other groups of ranks.
    if expert_size > 1:
        expert_group_name = name_of_experts(expert_size)
        for group in groups[:]:
            experts = [parameter for parameter in group["params"] if is_expert(parameter)]
            group["params"] = [p for p in group["params"] if not is_expert(p)]
            groups.append(as_expert_group({**group, "params": experts}, expert_group_name))
    if section.is_own:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in groups:
            group["names"] = [names[id(parameter)] for parameter in group["params"]]
    return groups


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set every group's learning rate to `lr` times the group's ratio to ``optimizer.lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
