"""Removes redundant per-parameter work from the ZeRO-1/2 optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.utils import get_norm_dtype
from torch import nn

from bigtrain.engine.deepspeed_patches.flat_gradients import FlatGradients
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.marks import is_model_parallel, is_replicated
from bigtrain.engine.deepspeed_patches.zero12_reduction import replace_reduction

NORM_CHUNK = 1 << 18
"""Elements of a gradient that are copied to float64 at a time: 2 MiB."""


def skip_redundant_work_of_zero12(optimizer: Any, host_time: HostTime) -> None:
    """Skip what changes nothing. Call once; does nothing to other optimizers. `host_time` counts
    the time of reductions from then on."""
    if not hasattr(optimizer, "round_robin_bit16_groups"):
        return
    skip_usage_reports(optimizer)
    keep_views(optimizer)
    take_norms_at_once(optimizer)
    if not replace_reduction(optimizer, host_time):
        copy_gradients_once(optimizer)
    keep_accumulating_nodes()


def skip_usage_reports(optimizer: Any) -> None:
    """Skip texts on how full the buckets are, which DeepSpeed 0.19.8 formats for each gradient and
    never shows (runtime/base_optimizer.py, `report_ipg_memory_usage`; runtime/utils.py)."""
    optimizer.report_ipg_memory_usage = lambda *_args, **_kwargs: None


def keep_views(optimizer: Any) -> None:
    """Keep parameters that are views of the group's flat tensor. DeepSpeed 0.19.8
    (runtime/zero/stage_1_and_2.py, `_update_model_bit16_weights`) makes them again after every
    update; they differ only if a tensor was moved, which changes its address."""
    update = optimizer._update_model_bit16_weights
    places_by_group: dict[int, list[int]] = {}

    def places(group_index: int) -> list[int]:
        parameters = optimizer.bit16_groups[group_index]
        return [t.data_ptr() for t in (optimizer.bit16_groups_flat[group_index], *parameters)]

    def update_where_moved(group_index: int) -> None:
        if places_by_group.get(group_index) != places(group_index):
            update(group_index)
            places_by_group[group_index] = places(group_index)

    optimizer._update_model_bit16_weights = update_where_moved


def take_norms_at_once(optimizer: Any) -> None:
    """Take the norms of all gradients of a group by one call of torch, in float64 and added up in
    the order of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, `get_grad_norm_direct`), which
    gets norms other than the 2-norm, and ranks that count nothing."""
    take = optimizer.get_grad_norm_direct
    counted_by_list: dict[int, tuple[Sequence[nn.Parameter], list[bool]]] = {}

    def which_count(params: Sequence[nn.Parameter]) -> list[bool]:
        if id(params) not in counted_by_list:  # which stays: `known` holds the list
            counts_all = optimizer.model_parallel_rank == 0
            counts = [not is_replicated(p) and (counts_all or is_model_parallel(p)) for p in params]
            counted_by_list[id(params)] = params, counts
        return counted_by_list[id(params)][1]

    def norm_of(
        gradients: Sequence[torch.Tensor], params: Sequence[nn.Parameter], norm_type: float = 2
    ) -> Any:
        if isinstance(gradients, FlatGradients):
            unpadded: Sequence[torch.Tensor] = gradients  # the parameters', then there is padding
        else:
            unpadded = [g.detach() for g in gradients if not getattr(g, "_zero_padding", False)]
        counted = list(compress(unpadded, which_count(params)))
        if norm_type != 2 or not counted:
            return take(gradients, params, norm_type)
        # On a CPU torch copies each tensor to float64, which for a large one is memory that the
        # system must clear and the cache does not hold. The sum of more parts differs by float64's
        # rounding, which float32 hardly ever shows.
        if any(t.numel() > NORM_CHUNK and t.device.type == "cpu" for t in counted):
            counted = [chunk for t in counted for chunk in t.flatten().split(NORM_CHUNK)]
        norms = torch._foreach_norm(counted, 2.0, dtype=get_norm_dtype())
        total = torch.stack(norms).pow(2.0).sum().float()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        norm = total.pow(0.5)
        mask_nan_or_inf_with_val_inplace(norm, device=optimizer.device)
        return norm

    optimizer.get_grad_norm_direct = norm_of


def copy_gradients_once(optimizer: Any) -> None:
    """Copy a reduced gradient out of the bucket with half of the calls of DeepSpeed 0.19.8
    (runtime/zero/stage_1_and_2.py, `copy_grads_in_partition`). It still copies the first of a step,
    which allocates the partition, and gradients of offloaded and of compact partitions."""
    copy = optimizer.copy_grads_in_partition
    is_compact = [
        optimizer._use_compact_grad_partition_buffer(i) for i in range(len(optimizer.bit16_groups))
    ]

    def copy_out(parameter: nn.Parameter, group_index: int | None = None) -> None:
        partition = optimizer.grads_in_partition
        if (
            partition is None
            or group_index is None
            or is_compact[group_index]
            or optimizer.cpu_offload
        ):
            copy(parameter, group_index)
            return
        gradient = optimizer.get_gradient_for_reduction(parameter)
        begin, length = optimizer.grads_in_partition_offset, gradient.numel()
        moved = partition.narrow(0, begin, length).view(gradient.shape).copy_(gradient)
        gradient.data = moved
        optimizer.grads_in_partition_offset = begin + length

    optimizer.copy_grads_in_partition = copy_out


def keep_accumulating_nodes() -> None:
    """Find once where autograd accumulates into each parameter, not at every backward pass as
    DeepSpeed 0.19.8 (runtime/utils.py, `count_used_parameters_in_backward`). A node stays while
    somebody holds it and the parameter keeps its dtype and device."""
    if not keeps_accumulating_nodes():
        stage_1_and_2.count_used_parameters_in_backward = _UsedParameters()


def keeps_accumulating_nodes() -> bool:
    """Return whether `keep_accumulating_nodes` was applied."""
    return isinstance(stage_1_and_2.count_used_parameters_in_backward, _UsedParameters)


class _UsedParameters:
    """Replacement of `count_used_parameters_in_backward`, called with a fixed list."""

    def __init__(self) -> None:
        self._list: Sequence[nn.Parameter] = ()
        self._kinds: list[tuple[torch.dtype, torch.device, bool]] = []
        self._nodes: list[Any] = []

    def __call__(self, parameters: Sequence[nn.Parameter]) -> int:
        traits = [(p.dtype, p.device, p.requires_grad) for p in parameters]
        if parameters is not self._list or traits != self._kinds:
            nodes = [
                torch.autograd.graph.get_gradient_edge(p).node
                for p in parameters
                if p.requires_grad
            ]
            self._list, self._kinds, self._nodes = parameters, traits, list(dict.fromkeys(nodes))
        return sum(map(torch._C._will_engine_execute_node, self._nodes))
