"""The torch optimizer inside what DeepSpeed wraps around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def inner_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


@torch.no_grad()
def undo_trial_update(engine: Any) -> None:
    """Take back the update that DeepSpeed makes while it wraps a 16-bit optimizer of ZeRO 0.

    It runs the optimizer once with zero gradients to allocate states. That decays the masters, and
    counts in the bias correction, which makes the first real update of AdamW 26% too small.
    """
    inner_optimizer(engine).state.clear()
    for parameter, master in zero0_masters(engine.optimizer):
        master.copy_(parameter.data.view(-1))


def zero0_masters(optimizer: Any) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """(parameter, its flat fp32 master) of DeepSpeed's 16-bit wrappers for ZeRO 0; else none."""
    return [
        (parameter, flat.data.view(-1).narrow(0, offset, parameter.numel()))
        for parameter, flat, offset in zero0_layout(optimizer)
    ]


def zero0_layout(optimizer: Any) -> list[tuple[nn.Parameter, Any, int]]:
    """(parameter, tensor that holds its master, offset in it) of the same wrappers.

    FP16_UnfusedOptimizer keeps a master per parameter, FP16_Optimizer one per group.
    """
    if not hasattr(optimizer, "fp16_groups") or hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return []
    found = []
    for index, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for number, parameter in enumerate(group):
            if hasattr(optimizer, "fp32_groups_flat"):
                found.append((parameter, optimizer.fp32_groups_flat[index], offset))
                offset += parameter.numel()
            else:
                found.append((parameter, optimizer.fp32_groups[index][number], 0))
    return found
