"""DeepSpeed's optimizer step: redundant work skipped, its gradient norm and loss scale read, and
the marks on parameters by which it takes the norm."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.utils import get_norm_dtype
from deepspeed.utils import nvtx
from torch import nn

from bigtrain.engine.deepspeed_patches.flat_gradients import FlatGradients
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.zero12_reduction import replace_reduction

_HOOK_FUNCTIONS = ("pre_bwd_fn", "post_bwd_fn")


def skip_redundant_work(
    engine: Any,
    replicas: dist.ProcessGroup,
    host_time: HostTime,
    compiled_layers: Collection[nn.Module] = frozenset(),
) -> None:
    """Skip work of DeepSpeed that changes no number. Call once, after `deepspeed.initialize`.
    replicas: the ranks over which gradients are averaged. host_time: counts the time of ZeRO's
    hooks and reductions from now on. compiled_layers: modules whose parameters ZeRO 3 gathers all
    together before it calls the forward method."""
    if dist.get_world_size(replicas) == 1:
        _skip_lone_reduction(engine)
    skip_overflow_check(engine.optimizer)
    if hasattr(engine.optimizer, "_update_hp_grad"):  # bfloat16 under ZeRO 1
        from bigtrain.engine.deepspeed_patches.bf16_update import shorten_bf16_update

        shorten_bf16_update(engine, counts_in_norm)
    skip_redundant_work_of_zero12(engine.optimizer, host_time)
    speed_up_hooks(engine.module)
    if hasattr(engine.optimizer, "parameter_offload"):  # ZeRO 3
        from bigtrain.engine.deepspeed_patches.zero3_hooks import replace_hooks

        replace_hooks(engine.optimizer, host_time, compiled_layers)


def skip_redundant_work_of_zero12(optimizer: Any, host_time: HostTime) -> None:
    """Do the part of `skip_redundant_work` for ZeRO 1 and 2; other optimizers are not changed."""
    if hasattr(optimizer, "round_robin_bit16_groups"):  # ZeRO 1 and 2
        take_norms_at_once(optimizer)
        can_fuse = False
        if optimizer.single_partition_of_fp32_groups[0].is_cuda:
            from bigtrain.engine.deepspeed_patches.zero12_update import FusedUpdate, can_fuse_update

            can_fuse = can_fuse_update(optimizer)
        is_replaced = replace_reduction(optimizer, host_time, update_averages=can_fuse)
        if is_replaced and can_fuse:
            FusedUpdate(optimizer).install()


@dataclass(frozen=True)
class SpeedPatch:
    """Replaced part of DeepSpeed, to save time; no number changes. function: name of the function
    that installs the replacement, here, in `bf16_update`, in `zero12_reduction` or in
    `zero3_hooks`. Its docstring has the price of DeepSpeed's part, 3 ms or more of a step of 300
    ms, for a model of 8.03 billion parameters in 291 tensors, on an H100 (2.88 TB/s) with one
    replica. `benchmarks/host_time.py --each 2` turns each patch off in turn. stages: ZeRO stages.
    is_in_place: returns whether DeepSpeed's `engine` runs the replacement."""

    name: str
    function: str
    stages: tuple[int, ...]
    is_in_place: Callable[[Any], bool]


def _is_replaced(name: str) -> Callable[[Any], bool]:
    """Return a check whether this package replaced the attribute `name` of the optimizer."""

    def check(engine: Any) -> bool:
        value = vars(engine.optimizer).get(name)
        return value is not None and value.__module__.startswith(__package__ or "")

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
        (0, 1),
        lambda engine: "allreduce_no_retain" in vars(engine),
    ),
    SpeedPatch(
        "one overflow check",
        "skip_overflow_check",
        (0,),
        lambda engine: isinstance(vars(engine.optimizer).get("overflow_checker"), _NoOverflowCheck),
    ),
    SpeedPatch(
        "norms in one call",
        "take_norms_at_once",
        (1, 2),
        _is_replaced("get_grad_norm_direct"),
    ),
    SpeedPatch(
        "planned reduction",
        "replace_reduction",
        (1, 2),
        _is_replaced("setup_buckets"),
    ),
    SpeedPatch(
        "short bfloat16 update",
        "shorten_bf16_update",
        (1,),
        _is_replaced("_update_hp_grad"),
    ),
    SpeedPatch(
        "module hooks",
        "replace_hooks",
        (3,),
        _has_own_hooks,
    ),
)
"""All speed patches. To drop a patch after an upgrade of DeepSpeed, measure it with the benchmark,
and delete the row, the function and the contract tests."""


def speed_patches_in_place(engine: Any) -> tuple[str, ...]:
    """Return the names of the `SPEED_PATCHES` that DeepSpeed's `engine` runs with."""
    return tuple(patch.name for patch in SPEED_PATCHES if patch.is_in_place(engine))


def take_norms_at_once(optimizer: Any) -> None:
    """Take the norms of all gradients of a group by one call of torch, in float64 and added up in
    the order of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, `get_grad_norm_direct`).
    DeepSpeed's function still computes norms other than the 2-norm, and is called on ranks that
    count no gradient.

    Price: DeepSpeed writes and reads each gradient in float64: 8.03e9 x 16 bytes / 2.88 TB/s = 45
    ms, 15% (8 replicas: 6 ms), and 2 x 291 more launches of 5 us are 3 ms.
    """
    deepspeed_norm = optimizer.get_grad_norm_direct
    # By the id of a list of parameters. The list is stored, too, so that its id stays taken.
    counted_by_list: dict[int, tuple[Sequence[nn.Parameter], list[bool]]] = {}

    def are_counted(params: Sequence[nn.Parameter]) -> list[bool]:
        if id(params) not in counted_by_list:
            counts_all = optimizer.model_parallel_rank == 0
            counts = [counts_in_norm(p, counts_all) for p in params]
            counted_by_list[id(params)] = params, counts
        _, counts = counted_by_list[id(params)]
        return counts

    def norm_of(
        gradients: Sequence[torch.Tensor], params: Sequence[nn.Parameter], norm_type: float = 2
    ) -> Any:
        if isinstance(gradients, FlatGradients):
            # A gradient for each parameter, then padding, which `compress` drops.
            unpadded: Sequence[torch.Tensor] = gradients
        else:
            unpadded = [g.detach() for g in gradients if not getattr(g, "_zero_padding", False)]
        counted = list(compress(unpadded, are_counted(params)))
        if norm_type != 2 or not counted:
            return deepspeed_norm(gradients, params, norm_type)
        norms = torch._foreach_norm(counted, 2.0, dtype=get_norm_dtype())
        total = torch.stack(norms).pow(2.0).sum().float()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        norm = total.pow(0.5)
        mask_nan_or_inf_with_val_inplace(norm, device=optimizer.device)
        return norm

    optimizer.get_grad_norm_direct = norm_of


def speed_up_hooks(model: nn.Module) -> None:
    """Save a sixth of the host time of DeepSpeed's hooks of ZeRO-3 that `replace_hooks` keeps.

    DeepSpeed 0.19.8 marks NVTX ranges (utils/nvtx.py, `enable_nvtx`); they are turned off without
    Nsight. Torch inspects the signature of a Function at every call (torch/autograd/function.py,
    `apply`; `_bind_default_args` of torch 2.15); DeepSpeed's Functions get it as an attribute
    (runtime/zero/parameter_offload.py, `pre_bwd_fn`, `post_bwd_fn`; runtime/zero/linear.py).

    Price: 225 linear layers x 2 forward passes (one recomputes) x 50 us = 22 ms, 7.5%.
    """
    nvtx.enable_nvtx = "NSYS_PROFILING_SESSION_ID" in os.environ
    classes = [LinearFunctionForZeroStage3]
    for module in model.modules():
        classes += [vars(module)[name] for name in _HOOK_FUNCTIONS if name in vars(module)]
    for function_class in classes:
        function_class.forward.__signature__ = inspect.signature(function_class.forward)


def skip_overflow_check(optimizer: Any) -> None:
    """Skip the overflow check per gradient in the 16-bit optimizer of ZeRO 0, for which the host
    waits for a GPU each time (0.19.8, runtime/fp16/unfused_optimizer.py:205). The optimizer also
    skips the step if its float32 norm is not finite, as it is if any gradient is not. Does nothing
    to other optimizers.

    Price: two reads of the gradients, 2 x 16.1 GB / 2.88 TB/s = 11 ms, 4%, and 291 waits of 10 us.
    """
    if isinstance(optimizer, FP16_UnfusedOptimizer) and not optimizer.fused_lamb_legacy:
        optimizer.overflow_checker = _NoOverflowCheck()


class _NoOverflowCheck:
    """Replacement of DeepSpeed's `CheckOverflow` that finds no overflow."""

    def check(self) -> bool:
        return False


def _skip_lone_reduction(engine: Any) -> None:
    """Skip the gradient reduction of ZeRO 0, and of bfloat16 ZeRO 1 with sums in float32, if there
    is only one replica. DeepSpeed 0.19.8 (runtime/engine.py:3828) flattens gradients, multiplies by
    1 and copies them back. Before that it gives zeros to parameters without a gradient, as it still
    does.

    Price: three passes that read and write the gradients, 3 x 2 x 16.1 GB / 2.88 TB/s = 33 ms, 11%.
    """
    optimizer = engine.optimizer
    gradient_dtype, *_ = engine.get_data_types()
    if isinstance(optimizer, BF16_Optimizer):
        gradient_dtype = optimizer.grad_acc_dtype
    # With other settings the reduction rounds the gradients.
    is_exact = engine.communication_data_type in (torch.float32, gradient_dtype)
    is_exact = is_exact and engine.gradient_predivide_factor() == 1.0
    reduced_classes = (torch.optim.Optimizer, FP16_UnfusedOptimizer, BF16_Optimizer)
    if is_exact and isinstance(optimizer, reduced_classes):
        engine.allreduce_no_retain = lambda *_, **__: None


def replace_clipping(engine: Any, clip: Callable[[], None]) -> None:
    """Let `clip` clip the gradients of fp32 ZeRO 0, the only case in which DeepSpeed 0.19.8
    discards the norm (runtime/engine.py:3502, `clip_fp32_gradients`). Computing the norm again
    would read all gradients once more: 32.1 GB / 2.88 TB/s = 11 ms, 4% of 300 ms."""
    engine.clip_fp32_gradients = clip


def measured_norm(optimizer: Any) -> Any:
    """Return the norm of the gradient that DeepSpeed has measured, before the update: the
    `_global_grad_norm` of every wrapper. The engine's public `get_global_grad_norm` returns it
    after the update (0.19.8, runtime/engine.py:3519)."""
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

    DeepSpeed 0.19.8 multiplies by the scale only for ZeRO's optimizers (runtime/engine.py,
    `backward`), but divides the gradients by the scale for ZeRO 0, too
    (runtime/fp16/unfused_optimizer.py and fused_optimizer.py): updates would be 65,536 times too
    small, without any overflow.
    """
    config = getattr(optimizer, "loss_scale_config", None)
    if config is None or not config.use_grad_scaling:
        return loss
    return loss.float() * float(optimizer.loss_scale)


def has_overflowed(optimizer: Any) -> bool:
    """Return whether DeepSpeed skipped the last update itself because the gradient was not finite.
    `overflow` of its 16-bit wrappers (0.19.8, runtime/base_optimizer.py and runtime/fp16/)."""
    return bool(getattr(optimizer, "overflow", False))


def is_model_parallel(parameter: Any) -> bool:
    """Return whether `parameter` is sharded over a tensor-parallel group, so that every rank counts
    its shard, not only the first rank. The mark is Megatron's; `bigtrain.models.parallel.sharding`
    (`tag_shard`) sets it. DeepSpeed 0.19.8 reads it in runtime/utils.py:134
    (`is_model_parallel_parameter`)."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def counts_in_norm(parameter: Any, counts_all: bool) -> bool:
    """Return whether a rank counts `parameter` in the norm: each element counts once over the ranks
    that have it. counts_all: on the first rank of a tensor-parallel group."""
    return not is_replicated(parameter) and (counts_all or is_model_parallel(parameter))


def mark_model_parallel(gradient: Any) -> None:
    """Mark a bare gradient as its parameter is marked, for norms that read only gradients.
    DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py:214 (`step`)."""
    gradient.tensor_model_parallel = True


def is_replicated(parameter: Any) -> bool:
    """Return whether another pipeline stage counts `parameter`. DeepSpeed 0.19.8 reads the mark in
    runtime/utils.py:517 and in every optimizer (runtime/constants.py:408, `PIPE_REPLICATED`)."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def mark_replicated(parameter: Any, replicated: bool) -> None:
    """Set whether another pipeline stage counts `parameter`; see `is_replicated`. `PipelineModule`
    sets it on the parameters that it contains (0.19.8, runtime/pipe/module.py:287)."""
    parameter.ds_pipe_replicated = replicated
