"""Training of the models of `tools/architecture_trials.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

_STEPS = 3


def train(parameters: list[nn.Parameter], step: Callable[[], float]) -> list[float]:
    """Losses of a few AdamW steps; ``eps=1`` so that the scale of gradients matters."""
    optimizer = torch.optim.AdamW(parameters, lr=1.0, eps=1.0, weight_decay=0.0)
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
    return losses


def sum_gradients(copies: list[nn.Parameter]) -> None:
    present = [p.grad for p in copies if p.grad is not None]
    for parameter in copies:
        parameter.grad = sum(present[1:], present[0]).clone() if present else None
