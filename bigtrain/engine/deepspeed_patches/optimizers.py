"""DeepSpeed's wrappers of the torch optimizer, and the location of fp32 masters in each ZeRO stage,
named as in 0.19.8. DeepSpeed's public functions gather a full parameter on every rank; bigtrain's
checkpoints read and write the parts in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.deepspeed_patches.partitions import MasterRange

_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def inner_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside DeepSpeed's wrappers, which call it `optimizer`."""
    optimizer = engine.optimizer
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def updating_optimizers(engine: Any) -> list[torch.optim.Optimizer]:
    """Return all torch optimizers that update parameters of `engine`. ZeRO-3 keeps a second one for
    the part of the update that it does not offload (0.19.8, runtime/zero/stage3.py:317,
    `backup_optimizer`)."""
    backup = getattr(engine.optimizer, "backup_optimizer", None)
    return [inner_optimizer(engine)] + ([] if backup is None else [backup])


@torch.no_grad()
def undo_trial_update(engine: Any) -> None:
    """Undo the update with zero gradients that DeepSpeed makes while it wraps a 16-bit optimizer of
    ZeRO 0 (0.19.8, runtime/fp16/unfused_optimizer.py, `initialize_optimizer_states`): it decays the
    masters, and makes the first real update of AdamW 26% too small."""
    inner_optimizer(engine).state.clear()
    for parameter, master in zero0_masters(engine.optimizer):
        master.copy_(parameter.data.view(-1))


def is_zero3(optimizer: Any) -> bool:
    """Return whether `optimizer` is ZeRO-3's, by its flat masters (runtime/zero/stage3.py:416)."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def zero0_masters(optimizer: Any) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return (parameter, flat fp32 master) of ZeRO 0's 16-bit wrappers; empty for others."""
    return [
        (parameter, flat.data.view(-1).narrow(0, offset, parameter.numel()))
        for parameter, flat, offset in zero0_layout(optimizer)
    ]


def zero0_layout(optimizer: Any) -> list[tuple[nn.Parameter, Any, int]]:
    """Return (parameter, tensor that contains its master, offset of the master) of ZeRO 0's 16-bit
    wrappers, which have a master per parameter (runtime/fp16/unfused_optimizer.py, `fp32_groups`)
    or per group (runtime/fp16/fused_optimizer.py, `fp32_groups_flat`); empty for others."""
    if not hasattr(optimizer, "fp16_groups") or is_zero3(optimizer):
        return []
    layout = []
    for index, group in enumerate(optimizer.fp16_groups):
        offset = 0
        for number, parameter in enumerate(group):
            if hasattr(optimizer, "fp32_groups_flat"):
                layout.append((parameter, optimizer.fp32_groups_flat[index], offset))
                offset += parameter.numel()
            else:
                layout.append((parameter, optimizer.fp32_groups[index][number], 0))
    return layout


def flat_partitions(optimizer: Any) -> list[torch.Tensor] | None:
    """Return this rank's flat masters, one per parameter group, of ZeRO-1 and 2
    (runtime/zero/stage_1_and_2.py, `single_partition_of_fp32_groups`) or of BF16_Optimizer
    (runtime/bf16_optimizer.py, `fp32_groups_flat_partition`); None for other optimizers."""
    if not _refreshes_itself(optimizer):
        return None
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            partitions: list[torch.Tensor] = getattr(optimizer, name)
            return partitions
    return []


def zero12_ranges(optimizer: Any, partitions: list[torch.Tensor]) -> dict[int, MasterRange]:
    """Return the ranges of this rank's masters in `flat_partitions`, by parameter's id.

    ZeRO 1 and 2 split a group's flat tensor evenly; the tensor's order is
    `round_robin_bit16_groups` with `round_robin_bit16_offsets` (0.19.8,
    runtime/zero/stage_1_and_2.py), which with ``round_robin_gradients`` differs from the order of
    `_hp_mapping`. BF16_Optimizer is read by `_hp_mapping` (utils/mixed_precision_linkage.py), not
    by the mapping's `optim_fragment`, which is linked after the first group's first update only.
    """
    if not hasattr(optimizer, "round_robin_bit16_groups"):
        return _mapped_ranges(optimizer, partitions)
    ranges = {}
    for index, (parameters, flat) in enumerate(
        zip(optimizer.round_robin_bit16_groups, partitions, strict=True)
    ):
        # Intersect each parameter with this rank's partition of the flat tensor.
        rank = dist.get_rank(group=optimizer.real_dp_process_group[index])
        partition_size = int(optimizer.partition_size[index])
        partition_begin = rank * partition_size
        partition_end = partition_begin + partition_size
        offsets = optimizer.round_robin_bit16_offsets[index]
        for parameter, offset in zip(parameters, offsets, strict=True):
            begin = max(offset, partition_begin)
            end = min(offset + parameter.numel(), partition_end)
            if begin < end:
                ranges[id(parameter)] = MasterRange(
                    flat, offset=begin - partition_begin, count=end - begin, start=begin - offset
                )
    return ranges


def _mapped_ranges(optimizer: Any, partitions: list[torch.Tensor]) -> dict[int, MasterRange]:
    """Return `zero12_ranges` of a BF16_Optimizer."""
    ranges = {}
    for parameter in (p for group in optimizer.bf16_groups for p in group):
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            # The address in the flat master (hp), and in the flattened parameter (lp).
            address = mapping.hp_fragment_address
            flat = partitions[mapping.param_group_index]
            start = mapping.lp_fragment_address.start
            ranges[id(parameter)] = MasterRange(flat, address.start, address.numel, start)
    return ranges


def masters_of_group(optimizer: Any, index: int, group: dict[str, Any]) -> list[Any]:
    """Return the masters that the torch optimizer updates in its group `index`. ZeRO-3 leaves the
    group empty between updates, and puts its sub-groups there one by one (0.19.8,
    runtime/zero/stage3.py, `_optimizer_step`)."""
    if not is_zero3(optimizer):
        return list(group["params"])
    return [
        flat
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat)
        if optimizer.sub_group_to_group_id[number] == index
    ]


@torch.no_grad()
def refresh_parameters(engine: Any) -> None:
    """Make the parameters used in forward agree with the masters, as DeepSpeed does after loading.
    Collective.

    ZeRO-3: `_reassign_or_swap_out_partitioned_parameters` (0.19.8, runtime/zero/stage3.py:2854,
    called so at :3565) and `persistent_parameters` (:296), which are never gathered again.
    Secondary partitions (hpZ) are copies of the old weights, and are made again when they are next
    needed (`invalidate_secondary_tensor`, :755).
    """
    optimizer = engine.optimizer
    if _refreshes_itself(optimizer):
        optimizer.update_lp_params()
    elif is_zero3(optimizer):
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
        for parameter in engine.module.parameters():
            parameter.ds_secondary_tensor = None
        if persistent:
            persistent[0].all_gather(persistent)
    else:
        for parameter, master in zero0_masters(optimizer):
            parameter.data.view(-1).copy_(master)


def _refreshes_itself(optimizer: Any) -> bool:
    """Return whether `optimizer` is of ZeRO-1 or 2, or BF16_Optimizer."""
    return hasattr(optimizer, "update_lp_params")


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """Return the state of float16's loss scaling (runtime/fp16/loss_scaler.py), if any."""
    scaler = _scaler(optimizer)
    return {name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)}


def restore_scaler(optimizer: Any, state: dict[str, Any]) -> None:
    """Set the fields of `state`, from `scaler_state`, that this optimizer's scaler has."""
    scaler = _scaler(optimizer)
    for name, value in state.items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _scaler(optimizer: Any) -> Any:
    """Return the holder of the scale: `loss_scaler` of ZeRO 1 to 3, `loss_scale_config` of ZeRO 0's
    wrappers (runtime/fp16/unfused_optimizer.py:60, fused_optimizer.py:73); None if nothing is
    scaled."""
    config = getattr(optimizer, "loss_scale_config", None)
    if config is not None:
        return config if config.use_grad_scaling else None
    return getattr(optimizer, "loss_scaler", None)


def kept_gradients(optimizer: Any) -> Any:
    """Return the gradients that ZeRO keeps until its step, in dicts and lists
    (`averaged_gradients`)."""
    return getattr(optimizer, "averaged_gradients", {})
