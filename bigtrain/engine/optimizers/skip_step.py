"""Skipping an optimizer update once a step's loss and gradient norm are known.

DeepSpeed measures the norm, clips and updates in one call. At every ZeRO stage the update is the
`step` of the inner torch optimizer, called when the norm is known. If this call is skipped,
weights, optimizer states and update counts keep their bits. If the norm is not finite, DeepSpeed
itself skips the update, and no rank reaches the inner call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.deepspeed_patches.optimizers import updating_optimizers
from bigtrain.engine.deepspeed_patches.step import has_overflowed
from bigtrain.models.torch_patches import shadow, unshadow


@dataclass(frozen=True)
class StepStats:
    """Stats by which an update may be skipped, equal on every rank: mean `loss` of the global batch
    in nats per token, and `grad_norm` before clipping; either may be not finite."""

    loss: float
    grad_norm: float


def mean_loss(loss_share: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    """Return this rank's term of the mean loss of the global batch, in nats per token; the mean is
    the sum of the terms of all ranks. Float64, on the device. `loss_share`: this rank's part of the
    summed loss; `num_targets`: of the full batch."""
    return loss_share.detach().double() / divisor(num_targets)


def divisor(num_targets: torch.Tensor) -> torch.Tensor:
    """Return the divisor of a batch's loss: the number of targets or the sum of their weights, and
    1 without targets."""
    return num_targets + (num_targets == 0)


SkipPolicy = Callable[[StepStats], bool]
"""Function that returns whether to make the update of a step. Called on every rank."""


class SkipStepHook:
    """Hook around the update of a DeepSpeed engine; without a `skip_policy` every update is
    made."""

    def __init__(self, engine: Any, norm: Callable[[], Any]) -> None:
        """Replace `step` of the engine's optimizers. `norm`: returns the gradient norm on this
        rank, right before the update."""
        self._engine = engine
        self._norm = norm
        self._skip_policy: SkipPolicy | None = None
        self._makes_update: bool | None = None  # the decision; None before it
        self._stats: StepStats | None = None
        self._optimizers = updating_optimizers(engine)
        for optimizer in self._optimizers:
            shadow(optimizer, "step", self._guarded(optimizer.step))

    def remove(self) -> None:
        """Leave the engine as it was. May be called again."""
        while self._optimizers:
            unshadow(self._optimizers.pop(), "step")

    def watch(
        self, skip_policy: SkipPolicy | None, loss_share: torch.Tensor, num_targets: torch.Tensor
    ) -> None:
        """Let `skip_policy` decide on the next update. `loss_share`: this rank's part of the summed
        loss of the global batch; `num_targets`: of the full global batch. Both stay on the device
        until the update begins."""
        self._skip_policy, self._makes_update = skip_policy, None
        self._loss_share, self._num_targets = loss_share, num_targets

    def close(self) -> StepStats | None:
        """Return the stats after the update; None without a `skip_policy`. Collective if DeepSpeed
        skipped the update itself."""
        skip_policy, makes_update, stats = self._skip_policy, self._makes_update, self._stats
        self._skip_policy = self._makes_update = self._stats = None
        if makes_update is not None:
            if not makes_update:
                # DeepSpeed reads states after the update: after a skipped first update that creates
                # empty states, which are removed.
                for optimizer in self._optimizers:
                    empty_keys = [key for key, state in optimizer.state.items() if not state]
                    for key in empty_keys:
                        del optimizer.state[key]
            return stats
        if skip_policy is None or not has_overflowed(self._engine.optimizer):
            return None
        # DeepSpeed skipped the update: tell the policy, except for a finite loss under dynamic loss
        # scaling (float16), where overflows are normal.
        stats = self._measure(math.inf)
        is_scaled = self._engine.fp16_enabled() and self._engine.dynamic_loss_scale()
        is_normal = is_scaled and math.isfinite(stats.loss)
        if not is_normal:
            skip_policy(stats)
        return stats

    def _guarded(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._skip_policy is not None and self._makes_update is None:
                # Decide at the first call: ZeRO 1 to 3 call this once for each parameter group.
                self._stats = self._measure(self._norm())
                self._makes_update = self._skip_policy(self._stats)
            is_skipped = self._makes_update is False
            return None if is_skipped else update(*args, **kwargs)

        return step

    def _measure(self, norm: Any) -> StepStats:
        """Return the stats, equal on every rank, by one small all-reduce; waits for the device."""
        num_ranks = dist.get_world_size()
        loss_term = mean_loss(self._loss_share, self._num_targets)
        rank_norm = torch.as_tensor(norm, device=loss_term.device).detach().double().reshape(())
        sums = torch.stack([loss_term, rank_norm / num_ranks])  # all ranks know the norm: the mean
        if num_ranks > 1:
            dist.all_reduce(sums)
        loss, mean_norm = sums.tolist()
        # DeepSpeed sometimes returns a negative norm if the norm is not finite.
        return StepStats(loss, mean_norm if mean_norm >= 0 else math.nan)
