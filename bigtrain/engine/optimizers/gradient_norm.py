"""Gradient norm of a model whose parameters are sharded over ranks, under float32 ZeRO 0.

DeepSpeed's optimizers compute their norms: ZeRO 1 and 2 by `norm_of` in
`deepspeed_patches/step.py`, ZeRO 3 by `get_grad_norm_direct` and `_get_norm_groups` of DeepSpeed's
runtime/zero/stage3.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.deepspeed_patches.step import (
    is_model_parallel,
    is_replicated,
    mark_model_parallel,
)
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.models.parallel.sharding import is_expert


def is_counted(parameter: Any, mesh: Mesh) -> bool:
    """Return whether this rank counts the gradient of `parameter` in the norm, so that every
    element counts once: every rank counts its shards, the first rank of a tensor-parallel group
    replicated parameters, and one pipeline stage tied parameters. DeepSpeed's norms read equal
    marks."""
    if is_replicated(parameter):
        return False
    return mesh.coordinates.tensor_rank == 0 or is_model_parallel(parameter)


def total_norm(parameters: Iterable[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    """Return the 2-norm of the full model's gradient, which is already averaged over replicas.
    Collective over `mesh.model`, and if ranks share the experts over `mesh.expert`."""
    all_parameters = list(parameters)
    # Either list may be empty, for example in a pipeline stage whose parameters are all frozen.
    gradients: list[torch.Tensor] = []
    expert_gradients: list[torch.Tensor] = []
    for parameter in all_parameters:
        if parameter.grad is not None and is_counted(parameter, mesh):
            (expert_gradients if is_expert(parameter) else gradients).append(parameter.grad)
    norm: torch.Tensor = torch.nn.utils.get_total_norm(gradients)
    if mesh.topology.expert_size > 1:
        expert_norm = torch.nn.utils.get_total_norm(expert_gradients)
        squared = expert_norm.to(all_parameters[0].device).square()
        dist.all_reduce(squared, group=mesh.expert)
        norm = (norm.to(squared.device).square() + squared).sqrt()
    if dist.get_world_size(mesh.model) > 1:
        squared = norm.to(all_parameters[0].device).square()
        dist.all_reduce(squared, group=mesh.model)
        norm = squared.sqrt()
    return norm


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh) -> torch.Tensor:
    """Scale the gradients down to `max_norm`; return `total_norm` before scaling. Collective."""
    all_parameters = list(parameters)
    with_gradient = [p for p in all_parameters if p.grad is not None]
    norm = total_norm(all_parameters, mesh)
    torch.nn.utils.clip_grads_with_norm_(with_gradient, max_norm, norm)
    return norm


def mark_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Mark gradients as their parameters are marked. DeepSpeed's FP16_UnfusedOptimizer (ZeRO 0 in
    16 bit, 0.19.8, fp16/unfused_optimizer.py:214) takes the norm of bare gradients, and would omit
    the shards of other ranks than the first."""
    for parameter in parameters:
        if parameter.grad is not None and is_model_parallel(parameter):
            mark_model_parallel(parameter.grad)
