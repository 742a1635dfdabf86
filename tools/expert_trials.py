"""Tries tiny models with their experts divided over two processes, which have a sample each.

A part of `tools/architecture_trials.py`. Every function is collective over the group of a trial.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import Problem
from bigtrain.models.equivalence.expert_parallel import check_expert_parallel
from bigtrain.models.equivalence.pipeline_stages import run_in_turn
from bigtrain.models.parallel.collectives import GroupRows
from bigtrain.models.parallel.experts import shard_experts
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.parallel.sharding import cut_parameter, is_expert
from bigtrain.models.parallel.stage_layout import StagePlan
from bigtrain.models.parallel.stages import Stage
from tools.trial_training import TrialModel, sum_gradients, train


def problems_of(trial: TrialModel) -> list[Problem]:
    """Return the problems that a run would report for `parallel.expert`. Not collective."""
    length = trial.objective.ids.shape[1]
    return check_expert_parallel(trial.config, trial.attention, 2, sequence_length=length)


def losses_whole(trial: TrialModel) -> tuple[list[float], list[nn.Module]]:
    """Losses of the steps of a divided model, and it."""
    model = _divided(trial)
    rank = dist.get_rank(trial.group)
    ids, labels = (part[rank : rank + 1] for part in (trial.objective.ids, trial.objective.labels))

    def step() -> float:
        loss = trial.objective(model(input_ids=ids, use_cache=False), labels, 2)
        loss.backward()
        return _sum(trial, loss, list(model.parameters()))

    return train(list(model.parameters()), step), [model]


def losses_in_stages(trial: TrialModel, plan: StagePlan) -> tuple[list[float], list[nn.Module]]:
    """Compute `losses_whole` in two stages, which each process runs one after the other."""
    stages = [Stage(_divided(trial), plan.layout, plan.cuts, index) for index in range(2)]
    held = [dict(stage.model.named_parameters()) for stage in stages]
    rank = dist.get_rank(trial.group)
    ids, labels = (part[rank : rank + 1] for part in (trial.objective.ids, trial.objective.labels))

    def step() -> float:
        outputs = run_in_turn(stages, ids, None, lambda o: trial.objective(o, labels, 2))
        for name, holders in stages[0].stages_by_shared_name.items():
            sum_gradients([held[index][name] for index in holders])
        parameters = [p for own in held for p in own.values()]
        return _sum(trial, trial.objective(outputs, labels, 2), parameters)

    losses = train([p for own in held for p in own.values()], step)
    return losses, [stage.model for stage in stages]


def _divided(trial: TrialModel) -> PreTrainedModel:
    model = copy.deepcopy(trial.pristine)
    shard_experts(model, GroupRows(trial.group))
    for parameter in model.parameters():
        cut_parameter(parameter)
    fit_experts(model)
    return model


def _sum(trial: TrialModel, loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """Return the loss of both samples; gradients of what both processes have are summed, once
    each."""
    for parameter in parameters:
        if not is_expert(parameter):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=trial.group)
    total = loss.detach().clone()
    dist.all_reduce(total, group=trial.group)
    return float(total)
