"""Optimizer of a run: its update rules, attached to DeepSpeed's masters, and parameter groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
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
"""Function from parameter groups to their optimizer, an argument of `deepspeed.initialize`."""


def optimizer_maker(
    section: OptimizerSection, model: nn.Module, mesh: Mesh, device: torch.device
) -> MakeOptimizer | None:
    """Return the function that makes the optimizer from `parameter_groups`; None if DeepSpeed makes
    the optimizer of its JSON. Collective over all ranks. Raises ConfigError for settings that do
    not fit the model."""
    if not section.is_own:
        return None
    dtype: torch.dtype = getattr(torch, section.state_dtype)
    inputs = RuleInputs(section, dtype, model, mesh, device)
    names = [section.type, *section.facts.names]
    rules = {name: rule_class(name).of(inputs) for name in names}
    decay = None if section.ema is None else section.ema.decay
    return lambda groups: RuleOptimizer(groups, rules, section.lr, dtype, decay)


def rule_class(name: str) -> type[UpdateRule]:
    """Return the update rule of ``optimizer.type`` = `name`."""
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
    """Return the parameter groups, any of which may be empty, in this order: with weight decay;
    without weight decay; hidden matrices, if the optimizer updates only these; small parameters, if
    the optimizer does not update these. With LoRA+ a second group for each group so far has the
    higher learning rate; then, if `expert_size` ranks divide experts, a further group for each
    group so far has the experts. `untrained`: as in `split_by_decay`."""
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

        # Move hidden matrices to a group. Adapters of weights that get no gradient stay in the
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
        groups.append(
            {
                "params": matrices,
                "weight_decay": section.weight_decay if decay is None else decay,
                "name": "matrices",
                "rule": section.type,
                "lr_ratio": 1.0 if lr is None else lr / section.lr,
            }
        )
    names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    if section.facts.small is not None:
        # Move parameters with few elements, which have another optimizer, to groups.
        limit = section.facts.min_elements
        for group in groups[:]:
            small, large = _partition(group["params"], lambda p: math.prod(full_shape(p)) < limit)
            group["params"] = large
            keys = {"params": small, "name": f"small_{group['name']}", "rule": section.facts.small}
            groups.append({**group, **keys})
    if adapters is not None and adapters.loraplus_lr_ratio is not None:
        # LoRA+ (Hayou et al. 2024, arXiv 2402.12354): B and vectors learn faster than A.
        for group in groups[:]:
            fast, slow = _partition(
                group["params"], lambda p: learns_faster(names_by_id[id(p)], full_shape(p))
            )
            group["params"] = slow
            keys = {"params": fast, "name": f"loraplus_{group['name']}"}
            groups.append({**group, **keys, "lr_ratio": adapters.loraplus_lr_ratio})
    # Experts that ranks divide: DeepSpeed reduces the gradients over other groups of ranks.
    if expert_size > 1:
        expert_group_name = name_of_experts(expert_size)
        for group in groups[:]:
            experts, group["params"] = _partition(group["params"], is_expert)
            groups.append(as_expert_group({**group, "params": experts}, expert_group_name))
    if section.is_own:
        for group in groups:
            group["names"] = [names_by_id[id(parameter)] for parameter in group["params"]]
    return groups


def _partition(
    parameters: Sequence[nn.Parameter], condition: Callable[[nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that fulfil the condition, and the remaining ones."""
    fulfilling = [parameter for parameter in parameters if condition(parameter)]
    remaining = [parameter for parameter in parameters if not condition(parameter)]
    return fulfilling, remaining


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set every group's learning rate to `lr` times the group's ratio to ``optimizer.lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
