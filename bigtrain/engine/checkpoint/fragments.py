"""What each rank owns of the model and its optimizer, as parts of full parameters.

DeepSpeed keeps fp32 masters and optimizer states in a different shape for every ZeRO stage. Here
they all become `Fragment`s: live views into DeepSpeed's own storage, described in terms of the
full Hugging Face parameter. Saving reads through the views, loading writes through them.

A parameter is cut twice: tensor parallelism leaves this rank a shard of it
(`bigtrain.models.parallel.sharding`), ZeRO a flat range of that shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigtrain.engine.deepspeed_patches.optimizers import (
    flat_partitions,
    inner_optimizer,
    is_zero3,
    masters_of_group,
    offloads_to_nvme,
    zero0_layout,
    zero12_range,
)
from bigtrain.engine.deepspeed_patches.partitions import MasterRange, frozen_range, zero3_range
from bigtrain.errors import CheckpointError
from bigtrain.models.parallel.sharding import Shard, local_shape, shard_of

MASTER = "master"


@dataclass(frozen=True)
class Fragment:
    """A flat range of one rank's shard of a parameter, and the storage for it.

    name: the parameter's Hugging Face name. shard: of the full parameter. start: of the range, in
    elements of the shard. tensors: 1-D views by kind (`MASTER`, then each optimizer state by its
    own name). capacity: as of `MasterRange`. is_replicated: whether all replicas hold the same.
    """

    name: str
    shard: Shard
    start: int
    tensors: dict[str, torch.Tensor]
    capacity: int | None = None
    is_replicated: bool = False

    def parts(self, kind: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """(offsets in the full parameter, view) of every rectangle that the fragment covers."""
        flat = self.tensors[kind]
        for cut in rectangles(self.shard.local_shape, self.start, flat.numel()):
            view = flat[cut.begin : cut.end].view(cut.sizes)
            for part in self.shard.cuts(cut.offsets, cut.sizes):
                yield part.offsets, view[part.where]


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a tensor, and the range of a fragment (in elements) that fills it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int


def rectangles(shape: tuple[int, ...], start: int, count: int) -> list[Rectangle]:
    """Cut the flat range [start, start + count) of a row-major tensor into rectangles.

    At most 2 * ndim - 1 of them: a partial first row, whole rows, a partial last row, and so on
    inside the partial ones. In order of the flat range.
    """
    found: list[Rectangle] = []
    _cut(shape, (), start, start + count, 0, found)
    return found


def _cut(
    shape: tuple[int, ...],
    prefix: tuple[int, ...],
    begin: int,
    end: int,
    filled: int,
    found: list[Rectangle],
) -> int:
    """Cut [begin, end) of the sub-tensor at index `prefix`; returns elements filled so far."""
    if begin >= end:
        return filled
    row = math.prod(shape[1:])
    if len(shape) <= 1 or (begin % row == 0 and end % row == 0):
        rows = (begin // row, end // row)
        ones = (1,) * len(prefix)
        size = end - begin
        found.append(
            Rectangle(
                (*prefix, rows[0], *(0 for _ in shape[1:])),
                (*ones, rows[1] - rows[0], *shape[1:]),
                filled,
                filled + size,
            )
        )
        return filled + size
    first, last = begin // row, (end - 1) // row
    if first == last:
        base = first * row
        return _cut(shape[1:], (*prefix, first), begin - base, end - base, filled, found)
    whole_from = first
    if begin % row:
        base = first * row
        filled = _cut(shape[1:], (*prefix, first), begin - base, row, filled, found)
        whole_from = first + 1
    whole_to = end // row
    filled = _cut(shape, prefix, whole_from * row, whole_to * row, filled, found)
    base = whole_to * row
    return _cut(shape[1:], (*prefix, whole_to), 0, end - base, filled, found)


def owned_fragments(engine: Any, model: nn.Module) -> list[Fragment]:
    """All fragments that this rank has of `model`, which `engine` trains.

    Parameters that are replicated appear on every rank that holds them; `shard.primary` is true
    on those that answer for them.

    Optimizer states are among them once they exist (`ensure_optimizer_states`). Not collective.
    """
    find = _finder(engine)
    fragments = []
    for name, parameter in model.named_parameters():
        fragment = find(name, parameter) if parameter.requires_grad else _frozen(name, parameter)
        if fragment is not None and fragment.tensors[MASTER].numel():
            fragments.append(fragment)
    return fragments


@torch.no_grad()
def ensure_optimizer_states(engine: Any) -> None:
    """Make a fresh optimizer allocate its states, leaving masters as they are.

    One update with zero gradients and zero learning rate: every optimizer allocates its states on
    its first update. It is not counted: where the first steps were bad, there has been none.
    """
    optimizer = inner_optimizer(engine)
    if optimizer.state:
        return
    masters = [
        masters_of_group(engine.optimizer, index, group)
        for index, group in enumerate(optimizer.param_groups)
    ]
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [group["params"] for group in optimizer.param_groups]
    gradients = [[master.grad for master in group] for group in masters]
    for group, group_masters in zip(optimizer.param_groups, masters, strict=True):
        group["lr"] = 0.0
        group["params"] = group_masters
        for master in group_masters:
            master.grad = torch.zeros_like(master)
    optimizer.step()
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = learning_rates[index]
        group["params"] = parameters[index]
        for master, gradient in zip(masters[index], gradients[index], strict=True):
            master.grad = gradient
    set_optimizer_step_count(engine, 0)


def optimizer_step_count(engine: Any) -> int:
    """Updates the optimizer has made, as it counts them for bias correction."""
    for state in inner_optimizer(engine).state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def set_optimizer_step_count(engine: Any, count: int) -> None:
    """Set the optimizer's own count of updates, in every parameter's state."""
    for state in inner_optimizer(engine).state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].fill_(count)
        elif "step" in state:
            state["step"] = count


def _finder(engine: Any) -> Any:
    optimizer = engine.optimizer
    states = inner_optimizer(engine).state
    if isinstance(optimizer, torch.optim.Optimizer):
        return lambda name, p: _part_of(name, p, p, 0, states)
    if is_zero3(optimizer):
        return lambda name, p: _zero3(name, p, optimizer, states)
    partitions = flat_partitions(optimizer)
    if partitions is not None:
        return lambda name, p: _fragment(name, p, zero12_range(p, partitions), states)
    layout = {id(p): (flat, offset) for p, flat, offset in zero0_layout(optimizer)}
    if layout:
        return lambda name, p: _part_of(name, p, *layout[id(p)], states)
    raise CheckpointError(
        f"the optimizer {type(optimizer).__name__} keeps its masters in a way that bigtrain does "
        "not know how to save"
    )


def _part_of(name: str, parameter: nn.Parameter, master: Any, offset: int, states: Any) -> Fragment:
    """A whole parameter whose master is a range of the tensor `master`."""
    tensors = _ranges(master, states.get(master, {}), offset, parameter.numel())
    return Fragment(name, _shard(parameter), 0, tensors, is_replicated=True)


def _ranges(master: Any, state: dict[str, Any], offset: int, count: int) -> dict[str, torch.Tensor]:
    """The range of a master and of every optimizer state that is shaped like it, by kind."""
    alike = {
        kind: value
        for kind, value in state.items()
        if torch.is_tensor(value) and value.shape == master.shape and value.ndim
    }
    return {
        kind: value.view(-1).narrow(0, offset, count)
        for kind, value in {MASTER: master.data, **alike}.items()
    }


def _fragment(
    name: str, parameter: nn.Parameter, found: MasterRange | None, states: Any
) -> Fragment | None:
    if found is None:
        return None
    tensors = _ranges(found.flat, states.get(found.flat, {}), found.offset, found.count)
    return Fragment(name, _shard(parameter), found.start, tensors, found.capacity)


def _zero3(name: str, parameter: nn.Parameter, optimizer: Any, states: Any) -> Fragment | None:
    if offloads_to_nvme(optimizer):
        raise CheckpointError(
            "optimizer states on NVMe cannot be saved yet: use offload_optimizer.device = cpu"
        )
    return _fragment(name, parameter, zero3_range(parameter, optimizer), states)


def _frozen(name: str, parameter: nn.Parameter) -> Fragment:
    found = frozen_range(parameter)
    values = found.flat.narrow(0, found.offset, found.count)
    is_whole = found.capacity is None
    return Fragment(
        name, _shard(parameter), found.start, {MASTER: values}, found.capacity, is_whole
    )


def _shard(parameter: Any) -> Shard:
    shard = shard_of(parameter)
    if shard is not None and shard.shape:
        return shard
    primary = shard is None or shard.primary
    return Shard(local_shape(parameter) or (1,), primary)
