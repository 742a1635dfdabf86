"""DeepSpeed's optimizer step: redundant work skipped, and its gradient norm and loss scale read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.utils import nvtx
from torch import nn

from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.partitions import gather_persistent_at_once
from bigtrain.engine.deepspeed_patches.zero3_hooks import replace_hooks
from bigtrain.engine.deepspeed_patches.zero12 import skip_redundant_work_of_zero12

_HOOK_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")


def skip_redundant_work(engine: Any, replicas: dist.ProcessGroup, host_time: HostTime) -> None:
    """Skip work of DeepSpeed that changes no number. Call once, after `deepspeed.initialize`.

    `replicas`: the ranks that gradients are averaged over. `host_time` counts the time of ZeRO's
    hooks and reductions from then on.
    """
    if dist.get_world_size(replicas) == 1:
        _skip_lone_reduction(engine)
    skip_overflow_check(engine.optimizer)
    skip_redundant_work_of_zero12(engine.optimizer, host_time)
    speed_up_hooks(engine.module)
    if replace_hooks(engine.optimizer, host_time):
        gather_persistent_at_once(engine.optimizer)


def speed_up_hooks(model: nn.Module) -> None:
    """Save a sixth of the host time of ZeRO-3's own hooks, where `replace_hooks` keeps them.

    DeepSpeed 0.19.8 marks NVTX ranges around each (utils/nvtx.py, `enable_nvtx`), which stay on
    under Nsight. Each passes tensors through a Function of its own
    (runtime/zero/parameter_offload.py, `pre_bwd_fn`, `post_bwd_fn`), and linear layers through
    another (runtime/zero/linear.py), whose signature torch inspects at every call
    (torch/autograd/function.py, `apply`) unless the function carries it.
    """
    nvtx.enable_nvtx = "NSYS_PROFILING_SESSION_ID" in os.environ
    kinds = [LinearFunctionForZeroStage3]
    for module in model.modules():
        kinds += [vars(module)[name] for name in _HOOK_FUNCTIONS if name in vars(module)]
    for kind in kinds:
        kind.forward.__signature__ = inspect.signature(kind.forward)


def skip_overflow_check(optimizer: Any) -> None:
    """Skip the overflow check of each gradient in the 16-bit optimizer of ZeRO 0.

    DeepSpeed (0.19.8, runtime/fp16/unfused_optimizer.py:205) reads for one gradient after the other
    whether it is finite, and a GPU's host waits for each. Then it takes their norm in float32,
    which is not finite if any gradient is not, and skips the step in that case by the same path.
    Does nothing to other optimizers.
    """
    if isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.fused_lamb_legacy:
        optimizer.overflow_checker = _NotYetKnown()


class _NotYetKnown:
    """Stands for DeepSpeed's `CheckOverflow`."""

    def check(self) -> bool:
        return False


def _skip_lone_reduction(engine: Any) -> None:
    """Skip ZeRO 0's gradient reduction if there is only one replica.

    DeepSpeed 0.19.8 (runtime/engine.py:3828) flattens gradients, multiplies by 1 and copies them
    back. What it does before, giving zeros to parameters without a gradient, stays.
    """
    if (
        isinstance(engine.optimizer, (torch.optim.Optimizer, FP16_UnfusedOptimizer))
        # Other settings round the gradients on the way.
        and engine.communication_data_type in (torch.float32, engine.get_data_types()[0])
        and engine.gradient_predivide_factor() == 1.0
    ):
        engine.allreduce_no_retain = lambda *_, **__: None


def replace_clipping(engine: Any, clip: Callable[[], None]) -> None:
    """Let `clip` clip the gradients of fp32 ZeRO 0, the only case in which the norm is not kept.

    DeepSpeed 0.19.8 (runtime/engine.py:3502, `clip_fp32_gradients`) discards the norm: computing it
    again would be another pass over all gradients.
    """
    engine.clip_fp32_gradients = clip


def measured_norm(optimizer: Any) -> Any:
    """The norm of the gradient when DeepSpeed has measured it and not yet used it.

    The engine's public `get_global_grad_norm` takes it over after the update (0.19.8,
    runtime/engine.py:3519, from `_global_grad_norm` of every wrapper).
    """
    return optimizer._global_grad_norm


def scale_of_norm(optimizer: Any) -> float:
    """The loss scale still in the next norm that `optimizer` measures; a host number.

    ZeRO 0's wrapper for float16 returns the norm of the scaled gradient (0.19.8,
    runtime/fp16/unfused_optimizer.py:224), every other one divides it by its scale. Call before the
    update, which may change the scale.
    """
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return 1.0
    return float(optimizer.loss_scale)


def scaled_loss(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """`loss` times the loss scale for the backward pass of float16 under ZeRO 0; else `loss`.

    DeepSpeed 0.19.8 multiplies it by the loss scale for ZeRO's optimizers alone (runtime/engine.py,
    `backward`: ``isinstance(self.optimizer, ZeROOptimizer)``), and divides the gradients by it for
    ZeRO 0 all the same (runtime/fp16/unfused_optimizer.py and fused_optimizer.py): updates would be
    of gradients 65,536 times too small, and no overflow would ever be seen.
    """
    config = getattr(optimizer, "loss_scale_config", None)
    if config is None or not config.use_grad_scaling:
        return loss
    return loss.float() * float(optimizer.loss_scale)


def has_overflowed(optimizer: Any) -> bool:
    """Whether DeepSpeed skipped the last update itself because the gradient was not finite.

    `overflow` of its 16-bit wrappers (0.19.8, runtime/base_optimizer.py and runtime/fp16/).
    """
    return bool(getattr(optimizer, "overflow", False))
