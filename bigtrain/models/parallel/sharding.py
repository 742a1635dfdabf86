"""The part of a full parameter that a rank holds: the single description of a shard.

Initialization, loading and checkpoints all use it, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from bigtrain.models.layers.parameters import local_shape

_ATTRIBUTE = "bigtrain_shard"


@dataclass(frozen=True)
class Cut:
    """A rectangle of a full tensor, and its location in a shard of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    where: tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """The rows of dimension `dim` of a full parameter that one rank holds.

    shape: of the full parameter. ranges: [start, stop) along `dim`, in the order they lie in the
    local tensor; several if matrices are packed in one parameter. local_size: along `dim`; rows
    beyond the ranges are padding, always zero, and not saved. primary: whether this rank counts its
    part in norms and writes it in checkpoints; of the ranks with the same part, one does. `dim` is
    None for a parameter that every rank holds in full. over: the group that divides it; fewer
    replicas hold the same part of experts (`Mesh.expert_replicas`).
    """

    shape: tuple[int, ...]
    primary: bool
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    local_size: int = 0
    over: Literal["tensor", "expert"] = "tensor"

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.local_size, *self.shape[self.dim + 1 :])

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the full tensor, as a tensor of its own."""
        if self.dim is None:
            return full
        local = full.new_zeros(self.local_shape)
        begin = 0
        for start, stop in self.ranges:
            local.narrow(self.dim, begin, stop - start).copy_(
                full.narrow(self.dim, start, stop - start)
            )
            begin += stop - start
        return local

    def cuts(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Cut]:
        """A rectangle of the local tensor as rectangles of the full one, without padding."""
        if self.dim is None:
            yield Cut(offsets, sizes, tuple(slice(0, size) for size in sizes))
            return
        dim, begin = self.dim, 0
        low, high = offsets[dim], offsets[dim] + sizes[dim]
        for start, stop in self.ranges:
            first, last = max(low, begin), min(high, begin + stop - start)
            if first < last:
                where = [slice(0, size) for size in sizes]
                where[dim] = slice(first - low, last - low)
                yield Cut(
                    (*offsets[:dim], start + first - begin, *offsets[dim + 1 :]),
                    (*sizes[:dim], last - first, *sizes[dim + 1 :]),
                    tuple(where),
                )
            begin += stop - start


def shard_of(parameter: Any) -> Shard | None:
    """Return the shard that `parameter` is; None if it was not tagged."""
    shard: Shard | None = getattr(parameter, _ATTRIBUTE, None)
    return shard


def tag_shard(parameter: nn.Parameter, shard: Shard) -> None:
    """Record on `parameter` which shard it is, for bigtrain and for DeepSpeed's norms.

    DeepSpeed counts `tensor_model_parallel` parameters on every rank and others on the first of
    a tensor-parallel group only (runtime/utils.py, is_model_parallel_parameter).
    """
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
    """Shape of the full parameter, whatever part of it this rank holds."""
    shard = shard_of(parameter)
    return shard.shape if shard is not None else local_shape(parameter)


def even_ranges(size: int, parts: int, rank: int) -> tuple[int, int]:
    """[start, stop) of part `rank` when `size` rows fall to `parts`, as evenly as they can."""
    share, rest = divmod(size, parts)
    start = rank * share + min(rank, rest)
    return start, start + share + (rank < rest)


def padded_range(size: int, parts: int, rank: int) -> tuple[tuple[int, int], int]:
    """([start, stop), rows held) of part `rank` when all parts hold equally many rows, padding at
    the end."""
    rows = -(-size // parts)
    start = min(rank * rows, size)
    return (start, min(start + rows, size)), rows
