"""Loss of a class of the user."""

from __future__ import annotations

from typing import Any

import torch

from bigtrain.errors import ExtensionError
from bigtrain.objectives.losses.objective_batch import ObjectiveBatch
from bigtrain.objectives.losses.passes import LogProbabilityLoss
from bigtrain.objectives.user import UserObjective
from bigtrain.settings.extensions import describe, import_named, location


class UserLoss(LogProbabilityLoss):
    """Loss of a class of the user; errors contain the location of the code."""

    def __init__(self, objective: UserObjective) -> None:
        super().__init__(objective)
        self._name = f"objective.type = {objective.name!r}"
        self._loss_class: Any = import_named("objective.type", objective.name)
        try:
            self._user_objective = self._loss_class(**objective.section.settings)
        except Exception as error:
            raise self._failure("its constructor", error) from error

    def loss(self, batch: ObjectiveBatch) -> torch.Tensor:
        try:
            loss = self._user_objective.loss(batch)
        except Exception as error:
            raise self._failure("loss", error) from error
        if not torch.is_tensor(loss) or loss.numel() != 1:
            result = f"of shape {list(loss.shape)}" if torch.is_tensor(loss) else f"a {type(loss)}"
            raise self._wrong(f"loss returned {result}, not a tensor with one element")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._wrong("loss returned a tensor without a graph, so that nothing would train")
        return loss.float().reshape(())

    def _failure(self, action: str, error: Exception) -> ExtensionError:
        text = describe(error, self._loss_class)
        return ExtensionError(f"{self._name}: {action} raised {text} -> correct it")

    def _wrong(self, rule: str) -> ExtensionError:
        defined_at = location(self._loss_class.loss)
        return ExtensionError(f"{self._name}: {rule} ({defined_at}) -> sum the losses of its units")
