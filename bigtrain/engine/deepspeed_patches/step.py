"""DeepSpeed's optimizer step: redundant work skipped, and its gradient norm and loss scale read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.utils import nvtx
from torch import nn

from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.partitions import gather_persistent_at_once
from bigtrain.engine.deepspeed_patches.zero12 import (
    keeps_accumulating_nodes,
    skip_redundant_work_of_zero12,
)

_HOOK_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")


def skip_redundant_work(engine: Any, replicas: dist.ProcessGroup, host_time: HostTime) -> None:
    """Skip work of DeepSpeed that changes no number. Call once, after `deepspeed.initialize`.
    `replicas`: the ranks that gradients are averaged over. `host_time` counts the time of ZeRO's
    hooks and reductions from then on."""
    if dist.get_world_size(replicas) == 1:
        _skip_lone_reduction(engine)
    skip_overflow_check(engine.optimizer)
    skip_redundant_work_of_zero12(engine.optimizer, host_time)
    speed_up_hooks(engine.module)
    if hasattr(engine.optimizer, "parameter_offload"):  # ZeRO 3
        from bigtrain.engine.deepspeed_patches.zero3_hooks import replace_hooks

        if replace_hooks(engine.optimizer, host_time):
            gather_persistent_at_once(engine.optimizer)


@dataclass(frozen=True)
class SpeedPatch:
    """Part of DeepSpeed that is replaced to save host time; no number changes. function: installs
    it, here or in `zero12`; `benchmarks/host_time.py --each 2` turns each off in turn, for the
    table of docs/benchmarks.md. saves: host time in milliseconds per optimizer step and parameter
    tensor (Llama of 434 small tensors, one rank). stages: of ZeRO. is_in_place: whether DeepSpeed's
    `engine` runs the replacement, read from the engine itself."""

    name: str
    function: str
    stages: tuple[int, ...]
    replaces: str
    saves: str
    is_in_place: Callable[[Any], bool]


def _is_replaced(name: str) -> Callable[[Any], bool]:
    """Return a check whether this package replaced the attribute `name` of the optimizer."""

    def check(engine: Any) -> bool:
        value = vars(engine.optimizer).get(name)
        module = getattr(value, "__module__", None) or type(value).__module__
        return value is not None and module.startswith(__package__ or "")

    return check


def _has_own_hooks(engine: Any) -> bool:
    if not hasattr(engine.optimizer, "parameter_offload"):
        return False
    from bigtrain.engine.deepspeed_patches.zero3_hooks import has_own_hooks

    return has_own_hooks(engine.optimizer)


SPEED_PATCHES = (
    SpeedPatch(
        "no reduction for one replica",
        "_skip_lone_reduction",
        (0,),
        "runtime/engine.py, allreduce_no_retain (ZeRO 0)",
        "two copies of all gradients",
        lambda engine: "allreduce_no_retain" in vars(engine),
    ),
    SpeedPatch(
        "one overflow check",
        "skip_overflow_check",
        (0,),
        "runtime/fp16/unfused_optimizer.py, overflow_checker (16-bit ZeRO 0)",
        "a wait for the device per gradient",
        lambda engine: isinstance(vars(engine.optimizer).get("overflow_checker"), _NoOverflowCheck),
    ),
    SpeedPatch(
        "no usage reports",
        "skip_usage_reports",
        (1, 2),
        "runtime/base_optimizer.py, report_ipg_memory_usage (ZeRO 1, 2)",
        "0.020 together with `views kept` (0.074 to 0.054)",
        _is_replaced("report_ipg_memory_usage"),
    ),
    SpeedPatch(
        "views kept",
        "keep_views",
        (1, 2),
        "runtime/zero/stage_1_and_2.py, _update_model_bit16_weights (ZeRO 1, 2)",
        "see `no usage reports`",
        _is_replaced("_update_model_bit16_weights"),
    ),
    SpeedPatch(
        "norms in one call",
        "take_norms_at_once",
        (1, 2),
        "runtime/zero/stage_1_and_2.py, get_grad_norm_direct (ZeRO 1, 2)",
        "0.016 together with `gradients copied once` and `autograd nodes kept` (0.056 to 0.040)",
        _is_replaced("get_grad_norm_direct"),
    ),
    SpeedPatch(
        "planned reduction",
        "replace_reduction",
        (1, 2),
        "runtime/zero/stage_1_and_2.py, gradient hooks and buckets (ZeRO 1, 2)",
        "0.031 (0.040 to 0.009); of large parameters 13 ms per million elements",
        _is_replaced("setup_buckets"),
    ),
    SpeedPatch(
        "gradients copied once",
        "copy_gradients_once",
        (1, 2),
        "runtime/zero/stage_1_and_2.py, copy_grads_in_partition (ZeRO 1, 2 without the plan)",
        "see `norms in one call`",
        _is_replaced("copy_grads_in_partition"),
    ),
    SpeedPatch(
        "autograd nodes kept",
        "keep_accumulating_nodes",
        (1, 2),
        "runtime/utils.py, count_used_parameters_in_backward (ZeRO 1, 2)",
        "see `norms in one call`",
        lambda engine: (
            hasattr(engine.optimizer, "round_robin_bit16_groups") and keeps_accumulating_nodes()
        ),
    ),
    SpeedPatch(
        "module hooks",
        "replace_hooks",
        (3,),
        "runtime/zero/parameter_offload.py, the hooks of ZeRO 3",
        "0.38 (0.65 to 0.27)",
        _has_own_hooks,
    ),
    SpeedPatch(
        "one gather of persistent parameters",
        "gather_persistent_at_once",
        (3,),
        "runtime/zero/stage3.py, the all-gather after an update (ZeRO 3)",
        "a collective per persistent parameter",
        lambda engine: any(
            "all_gather" in vars(parameter)
            and parameter.all_gather.__module__.startswith(__package__ or "")
            for parameter in getattr(engine.optimizer, "persistent_parameters", [])
        ),
    ),
)
"""All of them. To drop one after an upgrade of DeepSpeed, measure it with the benchmark, and delete
its row, its function and its contract tests."""


def speed_patches_in_place(engine: Any) -> tuple[str, ...]:
    """Return the names of the `SPEED_PATCHES` that DeepSpeed's `engine` runs with."""
    return tuple(patch.name for patch in SPEED_PATCHES if patch.is_in_place(engine))


def speed_up_hooks(model: nn.Module) -> None:
    """Save a sixth of the host time of ZeRO-3's own hooks, where `replace_hooks` keeps them.

    DeepSpeed 0.19.8 marks NVTX ranges (utils/nvtx.py, `enable_nvtx`), which stay on under Nsight.
    Its Functions (runtime/zero/parameter_offload.py, `pre_bwd_fn`, `post_bwd_fn`;
    runtime/zero/linear.py) get the signature that torch otherwise inspects at every call
    (torch/autograd/function.py, `apply`).
    """
    nvtx.enable_nvtx = "NSYS_PROFILING_SESSION_ID" in os.environ
    classes = [LinearFunctionForZeroStage3]
    for module in model.modules():
        classes += [vars(module)[name] for name in _HOOK_FUNCTIONS if name in vars(module)]
    for function_class in classes:
        function_class.forward.__signature__ = inspect.signature(function_class.forward)


def skip_overflow_check(optimizer: Any) -> None:
    """Skip the overflow check per gradient in the 16-bit optimizer of ZeRO 0, for which a GPU's
    host waits each time (0.19.8, runtime/fp16/unfused_optimizer.py:205). Its float32 norm is not
    finite if any gradient is not, and skips the step likewise. Does nothing to other optimizers."""
    if isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.fused_lamb_legacy:
        optimizer.overflow_checker = _NoOverflowCheck()


class _NoOverflowCheck:
    """Stands for DeepSpeed's `CheckOverflow`."""

    def check(self) -> bool:
        return False


def _skip_lone_reduction(engine: Any) -> None:
    """Skip ZeRO 0's gradient reduction if there is only one replica. DeepSpeed 0.19.8
    (runtime/engine.py:3828) flattens gradients, multiplies by 1 and copies them back. What it does
    before, giving zeros to parameters without a gradient, stays."""
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
    again would read all gradients once more."""
    engine.clip_fp32_gradients = clip


def measured_norm(optimizer: Any) -> Any:
    """Return the norm of the gradient after DeepSpeed measured it and before it is used. The
    engine's public `get_global_grad_norm` takes it over after the update (0.19.8,
    runtime/engine.py:3519, from `_global_grad_norm` of every wrapper)."""
    return optimizer._global_grad_norm


def scale_of_norm(optimizer: Any) -> float:
    """Return the loss scale still in the next norm that `optimizer` measures; a host number. Only
    ZeRO 0's wrapper for float16 returns the norm of the scaled gradient (0.19.8,
    runtime/fp16/unfused_optimizer.py:224). Call before the update, which may change the scale."""
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return 1.0
    return float(optimizer.loss_scale)


def scaled_loss(loss: torch.Tensor, optimizer: Any) -> torch.Tensor:
    """Return `loss` times the loss scale for the backward pass of float16 under ZeRO 0; else
    `loss`.

    DeepSpeed 0.19.8 multiplies by it only for ZeRO's optimizers (runtime/engine.py, `backward`),
    but divides the gradients by it for ZeRO 0, too (runtime/fp16/unfused_optimizer.py and
    fused_optimizer.py): updates would be 65,536 times too small, without any overflow.
    """
    config = getattr(optimizer, "loss_scale_config", None)
    if config is None or not config.use_grad_scaling:
        return loss
    return loss.float() * float(optimizer.loss_scale)


def has_overflowed(optimizer: Any) -> bool:
    """Return whether DeepSpeed skipped the last update itself because the gradient was not finite.
    `overflow` of its 16-bit wrappers (0.19.8, runtime/base_optimizer.py and runtime/fp16/)."""
    return bool(getattr(optimizer, "overflow", False))
