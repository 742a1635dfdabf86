"""The end of a step of `BF16_Optimizer` (bfloat16 under ZeRO 1, gradients added up in float32),
with fewer bytes moved. No number changes, except on a GPU, where `fused_adamw` replaces torch's
kernel and every replica sums only the gradients of the parameters that it updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import (
    get_global_norm_of_tensors,
    is_invalid_grad_norm,
    mask_nan_or_inf_with_val_inplace,
)
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import nn

from bigtrain.engine.deepspeed_patches.fused_adamw import gradient_factor
from bigtrain.models.torch_patches import shadow

_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The function's name in torch 2.13, which warns of the old name, or else in torch 2.11."""


def shorten_bf16_update(engine: Any, counts_in_norm: Callable[[Any, bool], bool]) -> bool:
    """Move fewer bytes at the end of a step of a `BF16_Optimizer`; return whether `engine` has
    this optimizer. counts_in_norm: returns whether a rank counts a parameter, given the parameter
    and whether this is the first rank of a tensor-parallel group.

    DeepSpeed 0.19.8 (runtime/bf16_optimizer.py) adds each gradient through a float32 copy to
    a sum that it sets to zero twice a step (`_update_hp_grad`, `clear_hp_grads`), sets the 16-bit
    gradients to zero before each pass, which adds to them, and clips by a further pass. Here the
    first gradient of a step is written over the old sum.

    Price: 24 bytes less for each of 8.03e9 parameters / 2.88 TB/s = 67 ms, 22%; with `fused_adamw`
    12 more are 33 ms, 11%. With replicas DeepSpeed sums all gradients on every rank, divides them,
    and takes the norm of all (8 + 8 + 4 bytes), where one of N ranks updates 1/N.
    """
    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer) or optimizer.immediate_grad_update:
        return False
    _Update(engine, counts_in_norm).install()
    return True


class _Update:
    """Replacement of the methods of a `BF16_Optimizer` that `install` names."""

    def __init__(self, engine: Any, counts_in_norm: Callable[[Any, bool], bool]) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self._counts_in_norm = counts_in_norm
        # Whether sums without a gradient of this step have been set to zero.
        self._is_complete = True
        self._fused: Any = None
        # Replicas by whose number the update still has to divide this rank's gradients.
        self._num_summed = 1
        self._counted: list[torch.Tensor] | None = None  # see `_counted_parts`

    def install(self) -> None:
        """Replace the methods."""
        optimizer = self._optimizer
        optimizer._update_hp_grad = self._add
        optimizer.get_grads_for_reduction = self._complete_before(optimizer.get_grads_for_reduction)
        optimizer.clear_hp_grads = self._forget
        # Without a gradient a pass writes one, instead of adding to zeros.
        optimizer.backward_prologue = lambda: optimizer.clear_lp_grads(set_to_none=True)
        optimizer.step = self._complete_before(optimizer.step)
        if optimizer.fp32_groups_flat_partition[0].is_cuda:
            self._fuse()

    def _fuse(self) -> None:
        """Let one kernel clip, update and write the parameters, if it supports the optimizer."""
        from bigtrain.engine.deepspeed_patches.fused_adamw import FusedAdamW

        optimizer = self._optimizer
        inner = optimizer.optimizer
        is_plain = not (optimizer.has_moe_layers or optimizer._uses_muon)
        sums_are_wide = optimizer.grad_acc_dtype == torch.float32
        if is_plain and sums_are_wide and FusedAdamW.supports(inner):
            # The 16-bit parameters of this rank's masters, one flat tensor a group.
            weights = [
                partitions[torch.distributed.get_rank(group=group)]
                for partitions, group in zip(
                    optimizer.bf16_partitioned_groups, optimizer.real_dp_process_group, strict=True
                )
            ]
            self._fused = FusedAdamW(inner, weights)
            shadow(inner, "step", self._fused.step)
            optimizer.step = self._complete_before(self._step)
            num_replicas = dist.get_world_size(group=optimizer.dp_process_group)
            if num_replicas > 1 and self._averages_afterwards():
                self._num_summed = num_replicas
                self._engine._reduce_non_expert_gradients = self._scatter

    def _averages_afterwards(self) -> bool:
        """Return whether DeepSpeed sums gradients in float32 over the same replicas for all groups,
        and divides the sums by the number of replicas."""
        engine, optimizer = self._engine, self._optimizer
        have_same_replicas = all(
            group is optimizer.dp_process_group for group in optimizer.real_dp_process_group
        )
        return (
            engine.gradient_average
            and engine.postscale_gradients()
            and engine.gradient_predivide_factor() == 1.0
            and engine.sequence_parallel_size == 1
            and engine.communication_data_type == torch.float32
            and have_same_replicas
        )

    @torch.no_grad()
    def _scatter(self, grads: list[torch.Tensor], elements_per_buffer: int) -> None:
        """Replace `_reduce_non_expert_gradients`: sum over the replicas, in place, the gradients
        that this rank updates; the update divides them. Collective over replicas."""
        optimizer = self._optimizer
        for part, total in zip(optimizer.fp32_groups_gradient_flat_partition, grads, strict=True):
            _reduce_scatter(part, total, group=optimizer.dp_process_group)

    def _norm_of_parts(self) -> torch.Tensor:
        """Return the norm of the mean gradient, float32 [], from the parts that the ranks update;
        -1 if it is not finite, as DeepSpeed does. Collective over replicas and the model-parallel
        group."""
        optimizer = self._optimizer
        if self._counted is None:
            self._counted = self._counted_parts()
        total = torch.zeros((), device=optimizer.fp32_groups_flat_partition[0].device)
        if self._counted:
            total += torch.stack(torch._foreach_norm(self._counted)).square().sum()
        dist.all_reduce(total, group=optimizer.dp_process_group)
        if optimizer.mpu is not None:
            dist.all_reduce(total, group=optimizer.mpu.get_model_parallel_group())
        norm = total.sqrt() / self._num_summed
        mask_nan_or_inf_with_val_inplace(norm, device=norm.device)
        return norm

    def _counted_parts(self) -> list[torch.Tensor]:
        """Return the parts of gradients that this rank counts in the norm, 1-D: each parameter
        counts once over the ranks that have it, as in `get_grads_for_norm`."""
        optimizer = self._optimizer
        rank = dist.get_rank(group=optimizer.dp_process_group)
        counts_all = bwc_tensor_model_parallel_rank(mpu=optimizer.mpu) == 0
        counted = []
        for parameters, partition in zip(
            optimizer.bf16_groups, optimizer.fp32_groups_gradient_flat_partition, strict=True
        ):
            # Offset of a parameter relative to this rank's partition of the group.
            offset = -rank * partition.numel()
            for parameter in parameters:
                begin, end = max(offset, 0), min(offset + parameter.numel(), partition.numel())
                offset += parameter.numel()
                if begin < end and self._counts_in_norm(parameter, counts_all):
                    counted.append(partition[begin:end])
        return counted

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter, group: int, index: int, clear_lp_grads: bool) -> None:
        """Add a gradient to its sum (`_update_hp_grad`), or write the first one of a step."""
        if parameter.grad is None:
            return
        optimizer = self._optimizer
        total = optimizer.fp32_groups_gradients[group][index]
        gradient = parameter.grad.view(total.shape)
        if optimizer.fp32_groups_has_gradients[group][index]:
            total.add_(gradient)
        else:
            # Equal to DeepSpeed's addition to a sum of +0.0, which turns -0.0 into +0.0; a copy
            # would not.
            torch.add(gradient, 0.0, out=total)
        marked: Any = parameter
        marked._hp_grad = total
        optimizer.fp32_groups_has_gradients[group][index] = True
        if clear_lp_grads:
            parameter.grad.zero_()

    def _complete_before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def complete_first(*args: Any, **kwargs: Any) -> Any:
            self._complete()
            return method(*args, **kwargs)

        return complete_first

    def _complete(self) -> None:
        """Set to zero, once in a step, the sums of parameters without a gradient in this step,
        before gradients of other ranks are added."""
        if self._is_complete:
            return
        self._is_complete = True
        optimizer = self._optimizer
        for sums, flags in zip(
            optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True
        ):
            for total, has_gradient in zip(sums, flags, strict=True):
                if not has_gradient:
                    total.zero_()

    def _forget(self) -> None:
        """Begin a step without gradients (`clear_hp_grads`); later gradients overwrite the sums."""
        optimizer = self._optimizer
        for index, sums in enumerate(optimizer.fp32_groups_gradients):
            optimizer.fp32_groups_has_gradients[index] = [False] * len(sums)
        self._is_complete = False

    @torch.no_grad()
    def _step(self) -> None:
        """Do `BF16_Optimizer.step` with an update that clips, and that writes the parameters."""
        optimizer, fused = self._optimizer, self._fused
        optimizer.overflow = False
        if self._num_summed > 1:
            norm = self._norm_of_parts()
        else:
            gradients, _ = optimizer.get_grads_for_norm()
            norm = get_global_norm_of_tensors(
                input_tensors=gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type
            )
        optimizer._global_grad_norm = norm
        # The norm is not finite if any gradient is not: then nothing is updated.
        if is_invalid_grad_norm(norm):
            optimizer.overflow = True
            optimizer._global_grad_norm = float("inf")
            self._forget()
            optimizer.clear_lp_grads()
            return
        # One kernel divides, clips, updates and writes the parameters.
        fused.gradient_factor = gradient_factor(norm, optimizer.clip_grad, self._num_summed)
        for master, gradient in zip(
            optimizer.fp32_groups_flat_partition,
            optimizer.fp32_groups_gradient_flat_partition,
            strict=True,
        ):
            master.grad = gradient
        fused.update_and_gather(
            optimizer, optimizer.bf16_groups_flat, optimizer.bf16_partitioned_groups
        )
        self._forget()
