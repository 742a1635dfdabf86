"""An optimizer that bigtrain does not have, whole in one file: what CONTRIBUTING's guide says is
all that a new one needs.

Signum (Bernstein et al. 2018, arXiv 1802.04434, algorithm 2): the sign of a momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from bigtrain.engine.optimizers.update_rule import (
    Master,
    RuleInputs,
    UpdateRule,
    chunks,
    store,
)
from bigtrain.parity.optimizers import PLAIN
from bigtrain.settings.run_config import OptimizerSection
from bigtrain.settings.sections.optimizer import OPTIMIZERS, OptimizerFacts

NAME = "signum"
FACTS = OptimizerFacts(
    __name__,
    ("momentum_buffer",),
    defaults={"betas": (0.9, 0.0)},
    unread={"eps": "a sign is divided by nothing"},
)


class Signum(UpdateRule):
    """Not collective. State: `momentum_buffer`."""

    def __init__(self, momentum: float, dtype: torch.dtype) -> None:
        self._momentum, self._dtype = momentum, dtype

    @classmethod
    def of(cls, inputs: RuleInputs) -> Self:
        return cls(inputs.section.betas[0], inputs.state_dtype)

    def update(self, masters: Sequence[Master], group: Mapping[str, Any]) -> None:
        for master in masters:
            master.step_count().add_(1)
            state = master.moment("momentum_buffer", self._dtype)
            for values, gradient, held in chunks(master.values, master.gradient, state):
                moment = held.float().lerp_(gradient, 1 - self._momentum)
                values.mul_(1 - group["lr"] * group["weight_decay"])
                values.add_(moment.sign(), alpha=-group["lr"])
                store(held, moment, gradient)


RULE = Signum


class Plain:
    """The same of whole masters, in groups with and without decay."""

    def __init__(self, groups: list[dict[str, Any]], section: OptimizerSection) -> None:
        self.param_groups, self._momentum = groups, section.betas[0]
        masters = [master for group in groups for master in group["params"]]
        self._moments = {id(master): torch.zeros_like(master) for master in masters}

    def step(self) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                m = self._moments[id(master)]
                m.copy_(self._momentum * m + (1 - self._momentum) * master.grad)
                master -= group["lr"] * (torch.sign(m) + group["weight_decay"] * master)


def register() -> None:
    """Make it a value of ``optimizer.type``, here and for `bigtrain parity`."""
    OPTIMIZERS[NAME] = FACTS
    PLAIN[NAME] = Plain


def signum(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Plain:
    """For `tests.parity.plain.train`."""
    momentum = OptimizerSection(lr=section["lr"], betas=(0.9, 0.0))
    decay = section.get("weight_decay", 0.1)
    groups = [
        {"params": [p for p in masters.values() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return Plain(groups, momentum)
