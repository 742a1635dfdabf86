"""AdamW element by element (Loshchilov and Hutter 2019, arXiv 1711.05101), by torch's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.optim.adamw import adamw

from bigtrain.engine.optimizers.update_rule import (
    Master,
    RuleInputs,
    UpdateRule,
    chunks,
    store,
)


class AdamW(UpdateRule):
    """Not collective. States: `exp_avg`, `exp_avg_sq`."""

    def __init__(self, betas: tuple[float, float], eps: float, state_dtype: torch.dtype) -> None:
        self._betas, self._eps, self._dtype = betas, eps, state_dtype

    @classmethod
    def of(cls, inputs: RuleInputs) -> Self:
        return cls(inputs.section.betas, inputs.section.eps, inputs.state_dtype)

    def update(self, masters: Sequence[Master], group: Mapping[str, Any]) -> None:
        for master in masters:
            step = master.step_count()
            first = master.moment("exp_avg", self._dtype)
            second = master.moment("exp_avg_sq", self._dtype)
            if self._dtype == torch.float32:
                self._fused(master.values, master.gradient, first, second, step=step, group=group)
                continue
            # Moments in 16 bits are float32 for a part of the elements at a time.
            for values, gradient, mean, square in chunks(
                master.values, master.gradient, first, second
            ):
                wide_mean, wide_square = mean.float(), square.float()
                self._fused(
                    values, gradient, wide_mean, wide_square, step=step.clone(), group=group
                )
                store(mean, wide_mean, gradient)
                store(square, wide_square, gradient)
            step += 1

    def _fused(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        step: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        """Update values and moments in place by torch's kernel, which also increments `step`."""
        adamw(
            [values],
            [gradient],
            [first],
            [second],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self._eps,
            maximize=False,
        )


RULE = AdamW
