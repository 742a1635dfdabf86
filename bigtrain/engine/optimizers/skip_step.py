"""Leaving out an optimizer update once a step's loss and gradient norm are known.

DeepSpeed measures the norm, clips and updates in one call. Whatever the ZeRO stage, the update is
the `step` of the torch optimizer inside, and by then the norm is known: that call is what is left
out. Weights, optimizer states and their count of updates stay as they were to the bit; DeepSpeed
goes on as after any step, and drops the gradients. Where the norm is not finite DeepSpeed leaves
the update out by itself (its path for overflows), and no process reaches the inner call.
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
    """What a step is judged by, the same on every rank: mean `loss` of the global batch in nats
    per token, and `grad_norm` before clipping; either may be not finite."""

    loss: float
    grad_norm: float


def mean_loss(loss_share: torch.Tensor, num_targets: torch.Tensor) -> torch.Tensor:
    """What this rank adds to the mean loss of the global batch: summed over all ranks it is
    that mean, in nats per token. Float64, on the device.

    `loss_share`: this rank's part of the summed loss; `num_targets`, of the whole batch.
    """
    return loss_share.detach().double() / num_targets.clamp(min=1)


SkipPolicy = Callable[[StepStats], bool]
"""Whether the update of a step with these figures is to be made. Called on every rank."""


class SkipStepHook:
    """Stands before the update of one DeepSpeed engine. Open unless a skip_policy is given."""

    def __init__(self, engine: Any, norm: Callable[[], Any]) -> None:
        """`norm`: the gradient norm as this rank knows it when the update is about to begin."""
        self._engine = engine
        self._norm = norm
        self._skip_policy: SkipPolicy | None = None
        self._is_open: bool | None = None
        self._found: StepStats | None = None
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
        """Let `skip_policy` decide on the update that follows.

        Parameters: `loss_share`, what this rank adds to the summed loss of the global batch;
        `num_targets`, of all of it. Both stay on the device until the update is about to begin.
        """
        self._skip_policy, self._is_open = skip_policy, None
        self._loss_share, self._num_targets = loss_share, num_targets

    def close(self) -> StepStats | None:
        """After the update: what it was judged by, None where it was not.

        Collective where DeepSpeed left the update out itself.
        """
        skip_policy, is_open, found = self._skip_policy, self._is_open, self._found
        self._skip_policy = self._is_open = self._found = None
        if is_open is not None:
            for optimizer in () if is_open else self._optimizers:
                # Looked at by DeepSpeed after what should have been the first update.
                for key in [key for key, value in optimizer.state.items() if not value]:
                    del optimizer.state[key]
            return found
        if skip_policy is None or not has_overflowed(self._engine.optimizer):
            return None
        figures = self._figures(math.inf)
        # Dynamic loss scaling of float16 overflows as a matter of course, and tries again.
        scaled = self._engine.fp16_enabled() and self._engine.dynamic_loss_scale()
        if not (scaled and math.isfinite(figures.loss)):
            skip_policy(figures)
        return figures

    def _guarded(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self._skip_policy is not None and self._is_open is None:
                # ZeRO 1 to 3 call once for each group of parameters; they are judged together.
                self._found = self._figures(self._norm())
                self._is_open = self._skip_policy(self._found)
            return update(*args, **kwargs) if self._is_open in (None, True) else None

        return step

    def _figures(self, norm: Any) -> StepStats:
        """The same numbers on every rank, by one small reduction; waits for the device."""
        size = dist.get_world_size()
        share = mean_loss(self._loss_share, self._num_targets)
        own = torch.as_tensor(norm, device=share.device).detach().double().reshape(()) / size
        figures = torch.stack([share, own])
        if size > 1:
            dist.all_reduce(figures)
        loss, norm_mean = figures.tolist()
        # Below zero is how DeepSpeed says not finite in places.
        return StepStats(loss, norm_mean if norm_mean >= 0 else math.nan)
