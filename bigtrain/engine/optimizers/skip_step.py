"""Skipping an optimizer update once a step's loss and gradient norm are known.

DeepSpeed measures the norm, clips and updates in one call. At every ZeRO stage the update is the
`step` of the inner torch optimizer, called when the norm is known: that call is skipped, and
weights, optimizer states and update counts stay bit for bit. If the norm is not finite, DeepSpeed
skips the update itself, and no rank reaches the inner call.
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
    """Return this rank's term of the mean loss of the global batch: summed over all ranks it is
    that mean, in nats per token. Float64, on the device. `loss_share`: this rank's part of the
    summed loss; `num_targets`, of the full batch."""
    return loss_share.detach().double() / divisor(num_targets)


def divisor(num_targets: torch.Tensor) -> torch.Tensor:
    """Return the divisor of a batch's loss: the number of targets or the sum of their weights, and
    1 without targets."""
    return num_targets + (num_targets == 0)


SkipPolicy = Callable[[StepStats], bool]
"""Whether the update of a step with these stats is to be made. Called on every rank."""


class SkipStepHook:
    """Wraps the update of one DeepSpeed engine; without a `skip_policy` every update is made."""

    def __init__(self, engine: Any, norm: Callable[[], Any]) -> None:
        """`norm`: the gradient norm as this rank knows it when the update is about to begin."""
        self._engine = engine
        self._norm = norm
        self._skip_policy: SkipPolicy | None = None
        self._makes_update: bool | None = None
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
        """Let `skip_policy` decide on the update that follows. Parameters: `loss_share`, what this
        rank adds to the summed loss of the global batch; `num_targets`, of the full global batch.
        Both stay on the device until the update is about to begin."""
        self._skip_policy, self._makes_update = skip_policy, None
        self._loss_share, self._num_targets = loss_share, num_targets

    def close(self) -> StepStats | None:
        """Return the stats after the update; None without a `skip_policy`. Collective if DeepSpeed
        skipped the update itself."""
        skip_policy, makes_update, stats = self._skip_policy, self._makes_update, self._stats
        self._skip_policy = self._makes_update = self._stats = None
        if makes_update is not None:
            if not makes_update:
                # Empty states that DeepSpeed creates by reading them after a skipped first update.
                for optimizer in self._optimizers:
                    empty_keys = [key for key, state in optimizer.state.items() if not state]
                    for key in empty_keys:
                        del optimizer.state[key]
            return stats
        if skip_policy is None or not has_overflowed(self._engine.optimizer):
            return None
        stats = self._measure(math.inf)
        # Overflows are normal in dynamic loss scaling of float16, which repeats the step.
        scaled = self._engine.fp16_enabled() and self._engine.dynamic_loss_scale()
        if not (scaled and math.isfinite(stats.loss)):
            skip_policy(stats)
        return stats

    def _guarded(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._skip_policy is not None and self._makes_update is None:
                # ZeRO 1 to 3 call this once for each parameter group; one decision holds for all.
                self._stats = self._measure(self._norm())
                self._makes_update = self._skip_policy(self._stats)
            return update(*args, **kwargs) if self._makes_update in (None, True) else None

        return step

    def _measure(self, norm: Any) -> StepStats:
        """Return the stats, equal on every rank, by one small all-reduce; waits for the device."""
        size = dist.get_world_size()
        share = mean_loss(self._loss_share, self._num_targets)
        norm_share = torch.as_tensor(norm, device=share.device).detach().double().reshape(()) / size
        sums = torch.stack([share, norm_share])
        if size > 1:
            dist.all_reduce(sums)
        loss, norm_mean = sums.tolist()
        # DeepSpeed sometimes returns a negative norm for one that is not finite.
        return StepStats(loss, norm_mean if norm_mean >= 0 else math.nan)
