"""ZeRO-3's partitioned parameters: a rank's part, and partitioning of full parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class MasterRange:
    """Flat range of a parameter (or of this rank's shard) from element `start` on, and its master:
    `count` elements of the flattened `master` from `offset` on. capacity: size of a ZeRO-3
    partition, which is equal on all replicas, though the last partitions may hold fewer elements;
    None for others. is_replicated: whether all replicas hold an equal range."""

    master: torch.Tensor
    offset: int
    count: int
    start: int
    capacity: int | None = None
    is_replicated: bool = False


class PartitioningInit(deepspeed.zero.Init):  # type: ignore[misc]
    """DeepSpeed's `zero.Init`, but without broadcasting the first rank's uninitialized parameters:
    the broadcast would allocate every full parameter once, which fragments the memory.

    Replaces `_zero_init_param` of 0.19.8 (runtime/zero/partition_parameters.py:1200). Parameters
    that a constructor makes in float32 get the dtype of all others, which DeepSpeed needs:
    `bigtrain.engine.optimizers.exact_parameters` has their exact values.
    """

    def _zero_init_param(self, param: nn.Parameter) -> None:
        if param.is_floating_point() and param.dtype != self.dtype:
            param.data = param.data.to(self.dtype)
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]


def partition_parameters(init: Any, parameters: list[nn.Parameter]) -> None:
    """Partition full `parameters` by `init`, a `deepspeed.zero.Init`, in its dtype, layer by layer.
    `Init(module=...)` takes a complete module (0.19.8, runtime/zero/partition_parameters.py:1181),
    by `_convert_to_zero_parameters` (:1209)."""
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.dtype != init.dtype:
            parameter.data = parameter.data.to(init.dtype)
    init._convert_to_zero_parameters(parameters)


def partition_of(parameter: Any) -> torch.Tensor | None:
    """Return this rank's part of a ZeRO-3 parameter between its uses; None for any other.
    `ds_tensor` of 0.19.8, runtime/zero/partition_parameters.py (`_partition_param`). DeepSpeed's
    public functions gather the full parameter instead."""
    return getattr(parameter, "ds_tensor", None)


def frozen_range(parameter: Any) -> MasterRange:
    """Return the location of this rank's part of a frozen parameter, which no optimizer has."""
    if partition_of(parameter) is None:
        return MasterRange(parameter.data.view(-1), 0, parameter.numel(), 0, is_replicated=True)
    start, count = _partition_range(parameter, dist.get_rank(group=parameter.ds_process_group))
    return MasterRange(parameter.ds_tensor.data, 0, count, start, parameter.ds_tensor.ds_numel)


def zero3_range(parameter: Any, optimizer: Any) -> MasterRange:
    """Return the location of this rank's part of a parameter's fp32 master. `grad_position`
    (0.19.8, runtime/zero/stage3.py:1955) holds the flat master of a sub-group and the offset;
    `_get_param_partition_rank` (:646) returns the part of the parameter."""
    group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start, count = _partition_range(parameter, optimizer._get_param_partition_rank(parameter))
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return MasterRange(flat, offset, count, start, parameter.ds_tensor.ds_numel)


def _partition_range(parameter: Any, rank: int) -> tuple[int, int]:
    """Return (start, count) of a ZeRO-3 partition within the full parameter, without padding.
    Partitions are equally large (0.19.8, runtime/zero/partition_parameters.py,
    `_partition_param`)."""
    capacity = parameter.ds_tensor.ds_numel
    start = min(capacity * rank, parameter.ds_numel)
    return start, min(capacity, parameter.ds_numel - start)
