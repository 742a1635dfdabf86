"""The end of a step of ZeRO 1 and 2 in bfloat16 with gradients added up in float32, on a GPU: one
kernel averages over replicas, clips, updates and writes the parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

from bigtrain.engine.deepspeed_patches.fused_adamw import FusedAdamW, gradient_factor
from bigtrain.models.torch_patches import shadow


def can_fuse_update(optimizer: Any) -> bool:
    """Return whether the update of `optimizer`, of ZeRO 1 or 2, can be one kernel: parameters in
    bfloat16, sums and masters in float32, on the device, and torch's AdamW. Compiles the kernel
    for a trial on a few numbers."""
    groups = range(len(optimizer.bit16_groups))
    is_plain = (
        optimizer.dtype == torch.bfloat16
        and optimizer.communication_data_type == torch.float32
        and optimizer.compute_grad_norm
        and optimizer.check_grad_overflow
        and optimizer.gradient_average
        and optimizer.sequence_parallel_size == 1
        and optimizer.loss_scale == 1.0
        and optimizer.torch_autocast_gradscaler is None
        and not optimizer.cpu_offload
        and not optimizer.zenflow
        and not optimizer.has_moe_layers
        and all(optimizer._use_compact_grad_partition_buffer(group) for group in groups)
        and all(p.dtype == torch.float32 for p in optimizer.single_partition_of_fp32_groups)
    )
    return is_plain and FusedAdamW.supports(optimizer.optimizer)


class FusedUpdate:
    """Replacement of the step of a `DeepSpeedZeroOptimizer` whose gradients `replace_reduction`
    sums at the ranks that own them, over the replicas without dividing.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, `step`) reads the gradients to find values that
    are not finite, which the norm also shows, clips them by a further pass, and copies the masters.

    Price: 4 + 4 + 8 + 6 bytes less for each of 8.03e9 parameters / 2.88 TB/s = 61 ms, 20%, with one
    replica.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._num_replicas = dist.get_world_size(group=optimizer.dp_process_group)
        rank = dist.get_rank(group=optimizer.dp_process_group)
        weights = [parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups]
        self._fused = FusedAdamW(optimizer.optimizer, weights)

    def install(self) -> None:
        """Replace the step, and the step of the optimizer inside."""
        shadow(self._optimizer.optimizer, "step", self._fused.step)
        self._optimizer.step = self._step

    @torch.no_grad()
    def _step(self, closure: None = None) -> None:
        """Do `DeepSpeedZeroOptimizer.step`. Collective over replicas."""
        assert closure is None
        optimizer, fused = self._optimizer, self._fused
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        # The norm of the sums is -1 if it is not finite; divided, it is still negative.
        norm = optimizer.scaled_global_norm() / self._num_replicas
        optimizer.overflow = optimizer.check_grad_overflow and is_invalid_grad_norm(norm)
        optimizer._update_scale(optimizer.overflow)
        if optimizer.overflow:
            optimizer._global_grad_norm = float("inf")
            optimizer.zero_grad(set_to_none=True)
            self._forget_gradients()
            return
        optimizer._global_grad_norm = norm
        fused.gradient_factor = gradient_factor(norm, optimizer.clip_grad, self._num_replicas)
        masters = optimizer.single_partition_of_fp32_groups
        for group, master in enumerate(masters):
            master.grad = optimizer.averaged_gradients[group].flat_partition
        self._forget_gradients()
        fused.update_and_gather(
            optimizer, optimizer.bit16_groups_flat, optimizer.parallel_partitioned_bit16_groups
        )
        for master in masters:
            master.grad = None

    def _forget_gradients(self) -> None:
        for group in range(len(self._optimizer.bit16_groups)):
            self._optimizer.averaged_gradients[group] = None
            self._optimizer.all_grad_tensors[group] = None
