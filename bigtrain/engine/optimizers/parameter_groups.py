"""The parameter groups of the optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from bigtrain.engine.deepspeed_patches.experts import as_expert_group, name_of_experts
from bigtrain.models.layers.parameter_roles import adapted_weight, split_by_decay
from bigtrain.models.layers.parameters import parameter_of
from bigtrain.models.parallel.hidden_matrices import hidden_matrices
from bigtrain.models.parallel.sharding import is_expert
from bigtrain.settings.run_config import OptimizerSection


def parameter_groups(
    model: nn.Module,
    section: OptimizerSection,
    expert_size: int,
    untrained: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Groups with and without weight decay, in this order, and of hidden matrices where the
    optimizer is for those alone; then the same groups of experts if `expert_size` ranks divide
    them. Any may be empty. `untrained`: as in `split_by_decay`.
    """
    split = split_by_decay(model, decay_embeddings=section.decay_embeddings, untrained=untrained)
    found: list[dict[str, Any]] = [
        {"params": split.decay, "weight_decay": section.weight_decay, "name": "decay"},
        {"params": split.no_decay, "weight_decay": 0.0, "name": "no_decay"},
    ]
    for group in found if section.is_own else ():
        group["rule"] = section.facts.beside or section.type
    if section.facts.beside is not None:
        found.append(_take_matrices(model, section, found, untrained))
    for group in found[:] if expert_size > 1 else ():
        experts = [parameter for parameter in group["params"] if is_expert(parameter)]
        group["params"] = [p for p in group["params"] if not is_expert(p)]
        found.append(as_expert_group({**group, "params": experts}, name_of_experts(expert_size)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in found if section.is_own else ():
        group["names"] = [names[id(parameter)] for parameter in group["params"]]
    return found


def _take_matrices(
    model: nn.Module,
    section: OptimizerSection,
    groups: list[dict[str, Any]],
    untrained: Collection[str],
) -> dict[str, Any]:
    """The group of hidden matrices; its parameters are removed from the other `groups`. Adapters of
    weights that get no gradient stay in theirs, which does not decay: torch skips them."""
    names = [name for name in hidden_matrices(model) if adapted_weight(name) not in untrained]
    chosen = {id(parameter_of(model, name)) for name in names}
    matrices = [p for group in groups for p in group["params"] if id(p) in chosen]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    own = section.own_settings
    decay, lr = getattr(own, "weight_decay", None), getattr(own, "lr", None)
    return {
        "params": matrices,
        "weight_decay": section.weight_decay if decay is None else decay,
        "name": "matrices",
        "rule": section.type,
        "lr_ratio": 1.0 if lr is None else lr / section.lr,
    }


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set every group's learning rate to `lr` times its own ratio to ``optimizer.lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
