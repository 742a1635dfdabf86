"""Models of `tools/architecture_trials.py`, and their training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from bigtrain.models.experts import auxiliary_loss
from tools.tiny_models import tiny_config, tiny_model

_STEPS = 3


class Objective:
    """The training loss of a batch, of some or all of its tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(3, 200, (2, 32), generator=generator)
        self.labels = F.pad(self.ids[:, 1:], (0, 1), value=-100)
        self._num_targets = int((self.labels != -100).sum())
        self._coefficient = float(getattr(model.config, "router_aux_loss_coef", 0.0) or 0.0)

    def __call__(
        self, outputs: Any, labels: torch.Tensor | None = None, num_parts: int = 1
    ) -> torch.Tensor:
        """Return the share of one of `num_parts`, whose `labels` fit the logits; their sum is the
        loss."""
        labels = self.labels if labels is None else labels
        logits = outputs.logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / self._num_targets
        auxiliary = auxiliary_loss(outputs)
        return loss if auxiliary is None else loss + self._coefficient / num_parts * auxiliary


class TrialModel:
    """Tiny model of one architecture, and the processes that train it. Not collective."""

    def __init__(self, model_type: str, group: Any) -> None:
        self.pristine = tiny_model(model_type)
        self.config = tiny_config(model_type)
        self.attention = str(self.pristine.config._attn_implementation)
        self.objective = Objective(self.pristine)
        if not _repeats(copy.deepcopy(self.pristine), self.objective.ids):
            self.pristine.eval()
        self.group = group


@torch.no_grad()
def _repeats(model: Any, ids: torch.Tensor) -> bool:
    """Return whether `model` gives the same numbers twice.

    Some have dropout that is not a module of its own and that no configuration here has switched
    off.
    """
    first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    return torch.equal(first, second)


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
