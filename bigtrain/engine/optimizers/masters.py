"""Ranges of the fp32 masters on this rank, for every ZeRO stage: each is a flat range (ZeRO) of a
shard (tensor or expert parallelism, `bigtrain.models.parallel.sharding`) of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from bigtrain.models.weights.packed import is_packed
from bigtrain.system.boxes import Box, flat_boxes


@dataclass(frozen=True)
class MasterPart(MasterRange):
    """Range of the shard that this rank holds of the parameter with the Hugging Face name
    `name`."""

    name: str = field(kw_only=True)
    shard: Shard = field(kw_only=True)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the range of a tensor that is shaped like the master, 1-D."""
        return tensor.view(-1).narrow(0, self.offset, self.count)

    def narrow(self, begin: int, end: int) -> MasterPart:
        """Return the part with the elements [begin, end) of this part; its master is a view."""
        view = self.of(self.master.data)[begin:end]
        return replace(self, master=view, offset=0, count=end - begin, start=self.start + begin)


def master_parts(engine: Any, model: nn.Module) -> Iterator[MasterPart]:
    """Yield all ranges that this rank has of the parameters of `model`, which `engine` trains. Not
    collective. The master of a frozen parameter is the parameter; weights in 4 bits have none.

    A sum over all weights counts the parts with `shard.primary`, and divides a part with
    `is_replicated` by the number of ranks that hold it (`mesh.replicas`, of experts
    `mesh.expert_replicas`). Raises CheckpointError if the masters cannot be reached."""
    find_range = _range_finder(engine.optimizer)
    for name, parameter in model.named_parameters():
        if is_packed(parameter):
            continue
        if parameter.requires_grad:
            master_range = find_range(parameter)
        else:
            master_range = frozen_range(parameter)
        if master_range is None:
            continue
        shard = shard_of(parameter)
        # A complete parameter, possibly a scalar, is a shard with its shape; a scalar has one
        # dimension.
        if shard is None or not shard.shape:
            primary = shard is None or shard.primary
            shard = Shard(local_shape(parameter) or (1,), primary=primary)
        yield MasterPart(**vars(master_range), name=name, shard=shard)


def _range_finder(optimizer: Any) -> Callable[[Any], MasterRange | None]:
    """Return a function from a trained parameter to its range on this rank, for the optimizer's
    ZeRO stage; None without a range."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return lambda p: MasterRange(p, 0, p.numel(), 0, is_replicated=True)
    if is_zero3(optimizer):
        return lambda p: zero3_range(p, optimizer)
    partitions = flat_partitions(optimizer)
    if partitions is not None:
        ranges = zero12_ranges(optimizer, partitions)
        return lambda p: ranges.get(id(p))
    replicated_ranges = {
        id(p): MasterRange(flat, offset, p.numel(), 0, is_replicated=True)
        for p, flat, offset in zero0_layout(optimizer)
    }
    if replicated_ranges:
        return lambda p: replicated_ranges[id(p)]
    raise CheckpointError(
        f"the optimizer {type(optimizer).__name__} keeps its masters in a way that bigtrain does "
        "not know how to save"
    )


def cut_parts(shard: Shard, start: int, flat: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the rectangles of the full parameter, with views, that `flat` covers: the range of the
    shard from element `start` on."""
    begin = 0
    for box in flat_boxes(shard.local_shape, start, flat.numel()):
        view = flat[begin : begin + box.num_elements].view(box.sizes)
        begin += box.num_elements
        for full, local in shard.to_full(box):
            yield full, view[local.slices]
