"""The part of a full parameter that a rank holds: the single description of a shard, for
initialization, loading and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from bigtrain.models.layers.parameters import local_shape
from bigtrain.system.boxes import ShardRanges

_ATTRIBUTE = "bigtrain_shard"


@dataclass(frozen=True)
class Shard(ShardRanges):
    """The rows along a dimension of a full parameter that one rank holds; padding is always zero,
    and not saved.

    primary: whether this rank counts its part in norms and writes the part in checkpoints; one of
    the ranks to which tensor parallelism or tied stages give equal parts does. Replicas of the rank
    (ZeRO 0) all have it: see `MasterRange.is_replicated`.
    over: the group that divides the parameter; fewer replicas hold a part of experts
    (`Mesh.expert_replicas`).
    """

    primary: bool = field(kw_only=True)
    over: Literal["tensor", "expert"] = field(default="tensor", kw_only=True)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the full tensor, copied."""
        if self.dim is None:
            return full
        local = full.new_zeros(self.local_shape)
        for full_box, local_box in self.boxes():
            local[local_box.slices].copy_(full[full_box.slices])
        return local

    def put(self, local: torch.Tensor) -> torch.Tensor:
        """Return a full tensor with this rank's part, and zeros elsewhere."""
        full = local.new_zeros(self.shape)
        for full_box, local_box in self.boxes():
            full[full_box.slices].copy_(local[local_box.slices])
        return full


def shard_of(parameter: Any) -> Shard | None:
    """Return the shard that `parameter` is; None if it was not tagged."""
    shard: Shard | None = getattr(parameter, _ATTRIBUTE, None)
    return shard


def tag_shard(parameter: nn.Parameter, shard: Shard) -> None:
    """Record on `parameter` which shard it is, for bigtrain and for DeepSpeed's norms. DeepSpeed
    counts `tensor_model_parallel` parameters on every rank and all further parameters on the first
    rank of a tensor-parallel group only (runtime/utils.py, is_model_parallel_parameter)."""
    setattr(parameter, _ATTRIBUTE, shard)
    parameter.tensor_model_parallel = (  # type: ignore[attr-defined]
        shard.dim is not None and shard.primary and shard.over == "tensor"
    )


@torch.no_grad()
def cut_parameter(parameter: nn.Parameter) -> None:
    """Reduce a full parameter to the shard it was tagged with."""
    shard = shard_of(parameter)
    if shard is not None and shard.dim is not None:
        assert parameter.shape == shard.shape, (parameter.shape, shard.shape)
        parameter.data = shard.take(parameter.data)


def is_expert(parameter: Any) -> bool:
    """Return whether `parameter` holds some of the experts that expert-parallel ranks divide."""
    shard = shard_of(parameter)
    return shard is not None and shard.over == "expert"


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the full parameter, for any shard."""
    shard = shard_of(parameter)
    return shard.shape if shard is not None else local_shape(parameter)


def even_ranges(size: int, parts: int, rank: int) -> tuple[int, int]:
    """Return [start, stop) of part `rank` when `size` rows are divided as evenly as possible."""
    share, remainder = divmod(size, parts)
    start = rank * share + min(rank, remainder)
    return start, start + share + (rank < remainder)


def padded_range(size: int, parts: int, rank: int) -> tuple[tuple[int, int], int]:
    """Return [start, stop) of part `rank`, and the number of rows that every part has: equally
    many, with padding at the end."""
    rows = -(-size // parts)
    start = min(rank * rows, size)
    return (start, min(start + rows, size)), rows
