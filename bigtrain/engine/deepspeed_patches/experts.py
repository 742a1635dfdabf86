"""Registration of bigtrain's experts and their groups with DeepSpeed.

DeepSpeed 0.19.8 supports expert parallelism for DeepSpeed's MoE layers only. With these functions
it partitions other experts, and averages their gradients, over the ranks that hold an expert
(runtime/engine.py:3899, zero/stage_1_and_2.py:1688, zero/stage3.py:689).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import nn

from bigtrain.engine.deepspeed_patches.startup import replaced

_GATHER = "_PartitionedParameterCoordinator__all_gather_params"


def name_of_experts(size: int) -> str:
    """Return DeepSpeed's name for the expert-parallel groups of `size` ranks and their
    data-parallel groups; it parses the number (0.19.8, utils/groups.py:671)."""
    return f"ep_size_{size}"


def set_expert_groups(experts: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
    """Set DeepSpeed's expert-parallel group, and the group of ranks with equal experts. Removes the
    groups of an earlier engine. Dicts of utils/groups.py:38 (0.19.8)."""
    size = dist.get_world_size(experts)
    for table, group in (
        (groups._EXPERT_PARALLEL_GROUP, experts),
        (groups._EXPERT_DATA_PARALLEL_GROUP, replicas),
    ):
        table.clear()
        if size > 1:
            table[name_of_experts(size)] = group


def mark_expert(parameter: nn.Parameter, name: str) -> None:
    """Mark `parameter`, before ZeRO-3 partitions it, as replicated over the experts' group `name`
    only. DeepSpeed 0.19.8 reads the first two marks in moe/utils.py:30 (`is_moe_param`), the other
    marks in zero/partition_parameters.py:1302 and zero/stage3.py:676."""
    marks: Any = parameter
    marks.allreduce = False
    marks.group_name = name
    marks.ds_zero_placement_family = "autoep_expert"
    marks.ds_zero_partition_group_name = name
    marks.ds_zero_partition_process_group = groups._EXPERT_DATA_PARALLEL_GROUP[name]


def as_expert_group(group: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the parameter group `group` with DeepSpeed's keys for experts (0.19.8,
    moe/utils.py:154)."""
    return {**group, "moe": True, "name": name}


@contextmanager
def engine_with_experts() -> Iterator[None]:
    """Let engines that are built inside treat their model as one with experts. Before an engine
    makes the optimizer, it searches the model for DeepSpeed's MoE layers (0.19.8,
    runtime/engine.py:2099); ZeRO-3 also refuses other experts (:2197)."""
    configure: Callable[..., None] = DeepSpeedEngine._configure_distributed_model

    def configure_with_experts(engine: Any, model: nn.Module) -> None:
        configure(engine, model)
        engine.has_moe_layers = True

    with (
        replaced(DeepSpeedEngine, "_configure_distributed_model", configure_with_experts),
        replaced(DeepSpeedEngine, "_validate_zero3_moe_compatibility", lambda _: None),
    ):
        yield


def count_absent_gradients(optimizer: Any, experts: str | None = None) -> None:
    """Make a rank without gradients, and a pipeline stage without `experts`, take part in the norm.
    BF16_Optimizer stacks the norms that a rank counts, which fails for a rank without norms, and
    sums the norms of experts over the stages for each name with gradients (0.19.8,
    runtime/bf16_optimizer.py:580, runtime/utils.py:1130). Does nothing to other optimizers."""
    if not isinstance(optimizer, BF16_Optimizer):
        return
    get_gradients, device = optimizer.get_grads_for_norm, optimizer.bf16_groups[0][0].device

    def get_with_zeros(for_clipping: bool = False) -> Any:
        gradients = get_gradients(for_clipping)
        if not for_clipping:
            counted, expert_gradients = gradients
            if not counted:
                counted.append(torch.zeros(1, device=device))
            if experts is not None and experts not in expert_gradients:
                expert_gradients[experts] = [torch.zeros(1, device=device)]
        return gradients

    optimizer.get_grads_for_norm = get_with_zeros


def fix_allgather_order(optimizer: Any) -> None:
    """Make ZeRO-3 gather parameters of several groups in one order on every rank.

    DeepSpeed 0.19.8 takes the parameters from a set (zero/partitioned_param_coordinator.py:569) and
    makes a collective per group in the set's order (zero/partition_parameters.py:1550), which
    differs between ranks and deadlocks on GPUs. Does nothing to other optimizers.
    """
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is None:
        return
    coordinator = offload.get_param_coordinator()
    gather = getattr(coordinator, _GATHER)

    def gather_sorted(params: Any, forward: bool) -> None:
        gather(sorted(params, key=lambda parameter: parameter.ds_id), forward)

    setattr(coordinator, _GATHER, gather_sorted)
