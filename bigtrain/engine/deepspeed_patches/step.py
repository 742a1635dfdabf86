"""DeepSpeed's optimizer step: work that changes no number left out, and its figures taken."""

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

_HOOK_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")


def skip_redundant_work(engine: Any, replicas: dist.ProcessGroup, host_time: HostTime) -> None:
    """Call once, right after `deepspeed.initialize`. Every number of a step stays what it was.

    `replicas`: the ranks that gradients are averaged over. The work is of ZeRO 0 and 3.
    `host_time` counts what ZeRO-3's hooks take from then on.
    """
    if dist.get_world_size(replicas) == 1:
        _leave_out_lone_reduction(engine)
    leave_overflow_to_the_norm(engine.optimizer)
    cheapen_hooks(engine.module)
    if replace_hooks(engine.optimizer, host_time):
        gather_persistent_at_once(engine.optimizer)


def cheapen_hooks(model: nn.Module) -> None:
    """Spare ZeRO-3's own hooks, where `replace_hooks` leaves them, a sixth of their host time.

    DeepSpeed 0.19.8 marks ranges for Nsight around each (utils/nvtx.py, `enable_nvtx`), which are
    kept where Nsight runs the program. Each passes tensors through a Function of its own
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


def leave_overflow_to_the_norm(optimizer: Any) -> None:
    """Spare the optimizer that ZeRO 0 has in 16 bit its look at every gradient.

    DeepSpeed (0.19.8, runtime/fp16/unfused_optimizer.py:205) reads one by one whether it is
    finite, for each of which a GPU's host waits. Then it takes the norm of all of them in float32,
    and where that is not finite, as it is wherever a gradient is not, it leaves the step out by
    the same path. Does nothing to other optimizers.
    """
    if isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.fused_lamb_legacy:
        optimizer.overflow_checker = _NotYetKnown()


class _NotYetKnown:
    """Stands for DeepSpeed's `CheckOverflow`."""

    def check(self) -> bool:
        return False


def _leave_out_lone_reduction(engine: Any) -> None:
    """Spare ZeRO 0 without replicas the copy of all gradients, reduced with nobody.

    DeepSpeed 0.19.8 (runtime/engine.py:3828) flattens them, multiplies by 1 and copies them back.
    What it does before, giving zeros to parameters without a gradient, stays.
    """
    if (
        isinstance(engine.optimizer, (torch.optim.Optimizer, FP16_UnfusedOptimizer))
        # Other settings round the gradients on the way.
        and engine.communication_data_type in (torch.float32, engine.get_data_types()[0])
        and engine.gradient_predivide_factor() == 1.0
    ):
        engine.allreduce_no_retain = lambda *_, **__: None


def replace_clipping(engine: Any, clip: Callable[[], None]) -> None:
    """Let `clip` clip the gradients of fp32 ZeRO 0, the only optimizer whose norm nobody keeps.

    DeepSpeed 0.19.8 (runtime/engine.py:3502, `clip_fp32_gradients`) throws the norm away: measuring
    it once more would be another pass over all gradients.
    """
    engine.clip_fp32_gradients = clip


def measured_norm(optimizer: Any) -> Any:
    """The norm of the gradient when DeepSpeed has measured it and not yet used it.

    The engine's public `get_global_grad_norm` takes it over after the update (0.19.8,
    runtime/engine.py:3519, from `_global_grad_norm` of every wrapper).
    """
    return optimizer._global_grad_norm


def scale_of_norm(optimizer: Any) -> float:
    """How many times too large the next norm is that `optimizer` measures; a host number.

    ZeRO 0's wrapper for float16 gives out the norm of the scaled gradient (0.19.8,
    runtime/fp16/unfused_optimizer.py:224), every other one divides it by its scale. Ask before the
    update, which may change the scale.
    """
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return 1.0
    return float(optimizer.loss_scale)


def scaled_loss(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """`loss` as it has to come into the backward pass of float16 under ZeRO 0; else itself.

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
    """Whether DeepSpeed left the last update out itself, since the gradient was not finite.

    `overflow` of its 16-bit wrappers (0.19.8, runtime/base_optimizer.py and runtime/fp16/).
    """
    return bool(getattr(optimizer, "overflow", False))
