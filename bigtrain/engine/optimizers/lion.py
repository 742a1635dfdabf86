"""Lion element by element (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

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


class Lion(UpdateRule):
    """Not collective. State: `exp_avg`."""

    def __init__(self, betas: tuple[float, float], state_dtype: torch.dtype) -> None:
        self._betas, self._dtype = betas, state_dtype

    @classmethod
    def of(cls, inputs: RuleInputs) -> Self:
        return cls(inputs.section.betas, inputs.state_dtype)

    def update(self, masters: Sequence[Master], group: Mapping[str, Any]) -> None:
        for master in masters:
            master.step_count().add_(1)
            moment = master.moment("exp_avg", self._dtype)
            for values, gradient, mean in chunks(master.values, master.gradient, moment):
                # x <- (1 - lr decay) x - lr sign(beta1 m + (1 - beta1) g)
                # m <- beta2 m + (1 - beta2) g
                wide_mean = mean.float()
                values.mul_(1 - group["lr"] * group["weight_decay"])
                direction = wide_mean.lerp(gradient, 1 - self._betas[0]).sign_()
                values.add_(direction, alpha=-group["lr"])
                store(mean, wide_mean.lerp_(gradient, 1 - self._betas[1]), gradient)


RULE = Lion
