"""Parts of the fp32 masters on this rank, for every ZeRO stage.

A parameter is sharded twice: tensor or expert parallelism leaves this rank a shard of it
(`bigtrain.models.parallel.sharding`), ZeRO a flat range of that shard. DeepSpeed stores the
ranges differently in every stage; here they all are `MasterPart`s.
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
    is_zero3,
    zero0_layout,
    zero12_ranges,
)
from bigtrain.engine.deepspeed_patches.partitions import MasterRange, frozen_range, zero3_range
from bigtrain.errors import CheckpointError
from bigtrain.models.layers.parameters import local_shape
from bigtrain.models.parallel.sharding import Shard, shard_of
from bigtrain.models.weights.quantized import is_packed
from bigtrain.system.boxes import Box


@dataclass(frozen=True)
class MasterPart:
    """A flat range of one rank's shard of a parameter, and the location of its master.

    name: the parameter's Hugging Face name. shard: of the full parameter. start: of the range, in
    elements of the shard. master: the tensor that the optimizer updates, of which `count` elements
    from `offset` on are the range. capacity: as of `MasterRange`. is_replicated: whether all
    replicas hold the same.
    """

    name: str
    shard: Shard
    start: int
    master: torch.Tensor
    offset: int
    count: int
    capacity: int | None = None
    is_replicated: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the range of a tensor that is shaped like the master, 1-D."""
        return tensor.view(-1).narrow(0, self.offset, self.count)


def master_parts(engine: Any, model: nn.Module) -> Iterator[MasterPart]:
    """Yield all parts that this rank has of the parameters of `model`, which `engine` trains.

    Frozen parameters, which no optimizer has, are their own masters; weights in 4 bits have none.
    Parameters that are replicated appear on every rank that holds them; `shard.primary` is true on
    the one that writes and counts them. Not collective. Raises CheckpointError if the masters
    cannot be reached.
    """
    find = _finder(engine.optimizer)
    for name, parameter in model.named_parameters():
        if is_packed(parameter):
            continue
        location = find(parameter) if parameter.requires_grad else frozen_range(parameter)
        if location is None:
            continue
        whole = isinstance(location, ReplicatedRange) or (
            not parameter.requires_grad and location.capacity is None
        )
        yield MasterPart(
            name,
            _shard(parameter),
            location.start,
            location.flat,
            location.offset,
            location.count,
            location.capacity,
            whole,
        )


class ReplicatedRange(MasterRange):
    """The range of a parameter that every replica holds in full."""


def _finder(optimizer: Any) -> Any:
    if isinstance(optimizer, torch.optim.Optimizer):
        return lambda p: ReplicatedRange(p, 0, p.numel(), 0)
    if is_zero3(optimizer):
        return lambda p: zero3_range(p, optimizer)
    partitions = flat_partitions(optimizer)
    if partitions is not None:
        ranges = zero12_ranges(optimizer, partitions)
        return lambda p: ranges.get(id(p))
    layout = {id(p): (flat, offset) for p, flat, offset in zero0_layout(optimizer)}
    if layout:
        return lambda p: ReplicatedRange(*layout[id(p)], p.numel(), 0)
    raise CheckpointError(
        f"the optimizer {type(optimizer).__name__} keeps its masters in a way that bigtrain does "
        "not know how to save"
    )


def _shard(parameter: Any) -> Shard:
    shard = shard_of(parameter)
    if shard is not None and shard.shape:
        return shard
    primary = shard is None or shard.primary
    return Shard(local_shape(parameter) or (1,), primary=primary)


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a tensor, and the range of a fragment (in elements) that fills it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int


def rectangles(shape: tuple[int, ...], start: int, count: int) -> list[Rectangle]:
    """Split the flat range [start, start + count) of a row-major tensor into rectangles.

    At most 2 * ndim - 1 of them: a partial first row, full rows, a partial last row, and so on
    inside the partial ones. In order of the flat range.
    """
    result: list[Rectangle] = []
    _cut(shape, (), start, start + count, 0, result)
    return result


def _cut(
    shape: tuple[int, ...],
    prefix: tuple[int, ...],
    begin: int,
    end: int,
    filled: int,
    result: list[Rectangle],
) -> int:
    """Split [begin, end) of the sub-tensor at index `prefix`; returns elements filled so far."""
    if begin >= end:
        return filled
    row = math.prod(shape[1:])
    if len(shape) <= 1 or (begin % row == 0 and end % row == 0):
        rows = (begin // row, end // row)
        ones = (1,) * len(prefix)
        size = end - begin
        result.append(
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
        return _cut(shape[1:], (*prefix, first), begin - base, end - base, filled, result)
    whole_from = first
    if begin % row:
        base = first * row
        filled = _cut(shape[1:], (*prefix, first), begin - base, row, filled, result)
        whole_from = first + 1
    whole_to = end // row
    filled = _cut(shape, prefix, whole_from * row, whole_to * row, filled, result)
    base = whole_to * row
    return _cut(shape[1:], (*prefix, whole_to), 0, end - base, filled, result)


def cut_parts(
    shard: Shard, start: int, flat: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield (offsets in the full parameter, view) of every rectangle of the shard that `flat`
    covers, which is its range from `start` on."""
    for cut in rectangles(shard.local_shape, start, flat.numel()):
        view = flat[cut.begin : cut.end].view(cut.sizes)
        for full, local in shard.to_full(Box(cut.offsets, cut.sizes)):
            yield full.offsets, view[local.slices]
