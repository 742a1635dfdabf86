"""Rectangles of tensors, and the parts of a full tensor that a shard holds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Rectangle of a tensor: its offset and its size in every dimension."""

    offsets: Numbers
    sizes: Numbers

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the rectangle that is all of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the rectangle: ``tensor[box.slices]`` is a view of its elements."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)

    def replace(self, dim: int, offset: int, size: int) -> Self:
        """Return this rectangle with another range along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = offset, size
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes))

    def moved(self, offsets: Sequence[int]) -> Self:
        """Return this rectangle moved by `offsets`: from the coordinates of an outer rectangle at
        `offsets` to the tensor's coordinates."""
        moved = (start + shift for start, shift in zip(self.offsets, offsets, strict=True))
        return replace(self, offsets=tuple(moved))

    def relative_to(self, outer: Box) -> Self:
        """Return this rectangle in the coordinates of `outer`; the inverse of `moved`."""
        return self.moved([-offset for offset in outer.offsets])

    def intersect(self, box: Box) -> Self | None:
        """Return the rectangle of the elements in both; None if there are none."""
        dimensions = zip(self.offsets, self.sizes, box.offsets, box.sizes, strict=True)
        offsets, sizes = [], []
        for start, size, other_start, other_size in dimensions:
            low = max(start, other_start)
            high = min(start + size, other_start + other_size)
            if low >= high:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes))

    def difference(self, inner: Box) -> Iterator[Self]:
        """Yield rectangles that together have the elements outside of `inner`, which is inside this
        rectangle."""
        remainder = self  # along the dimensions that are done, as large as `inner`
        for dim, (first, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
            end = remainder.offsets[dim] + remainder.sizes[dim]
            for low, high in ((remainder.offsets[dim], first), (first + size, end)):
                if low < high:
                    yield remainder.replace(dim, low, high - low)
            remainder = remainder.replace(dim, first, size)

    def split(self, max_elements: int) -> Iterator[Self]:
        """Yield rectangles of at most `max_elements` elements that cover this rectangle."""
        if self.num_elements <= max_elements:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        half = self.replace(dim, self.offsets[dim], self.sizes[dim] // 2)
        for part in (half, *self.difference(half)):
            yield from part.split(max_elements)

    def flat_ends(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the flat (row-major) positions of the first and the last element in a tensor of
        this shape."""
        first = last = 0
        for length, offset, size in zip(shape, self.offsets, self.sizes, strict=True):
            first, last = first * length + offset, last * length + offset + size - 1
        return first, last

    def is_flat_range(self, shape: Sequence[int]) -> bool:
        """Return whether its elements are contiguous in a row-major tensor of this shape."""
        first, last = self.flat_ends(shape)
        return last - first + 1 == self.num_elements


def flat_boxes(shape: Numbers, start: int, count: int) -> list[Box]:
    """Split the flat range [start, start + count) of a row-major tensor into rectangles.

    The rectangles, at most 2 * ndim - 1, are in the order of the range: a partial first row, full
    rows, a partial last row, and recursively inside the partial rows.
    """
    if count <= 0:
        return []
    if len(shape) <= 1:
        return [Box((start,), (count,))]
    row_size, end = math.prod(shape[1:]), start + count
    first, stop = -(-start // row_size), end // row_size  # the full rows [first, stop)
    if first > stop:  # the range is inside one row
        return _in_row(shape, stop, start, end)
    boxes = _in_row(shape, first - 1, start, first * row_size)
    if first < stop:
        boxes.append(Box.full(shape).replace(0, first, stop - first))
    return boxes + _in_row(shape, stop, stop * row_size, end)


def _in_row(shape: Numbers, row: int, start: int, end: int) -> list[Box]:
    """Return the rectangles of the flat range [start, end), inside `row`, of a tensor; none if the
    range is empty."""
    inner = flat_boxes(shape[1:], start - row * math.prod(shape[1:]), end - start)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner]


@dataclass(frozen=True)
class ShardRanges:
    """The rows of dimension `dim` of a full tensor that a shard holds.

    shape: of the full tensor. ranges: [start, stop) along `dim`, in their order in the shard;
    several if matrices are packed in one tensor. local_size: of the shard along `dim`; rows beyond
    the ranges are padding. `dim` is None for a shard that is the full tensor.
    """

    shape: Numbers
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    local_size: int = 0

    @property
    def local_shape(self) -> Numbers:
        """Shape of the shard, padding included."""
        return self._rows(0, self.local_size).sizes

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield each rectangle that the shard holds, in coordinates of the full tensor and of the
        shard."""
        if self.dim is None:
            yield Box.full(self.shape), Box.full(self.shape)
            return
        begin = 0
        for start, stop in self.ranges:
            yield self._rows(start, stop - start), self._rows(begin, stop - start)
            begin += stop - start

    def to_full(self, local: Box) -> Iterator[tuple[Box, Box]]:
        """Yield the elements of a rectangle `local` of the shard, without padding: rectangles in
        coordinates of the full tensor, and relative to `local`."""
        for full, local_box in self.boxes():
            common = local_box.intersect(local)
            if common is not None:
                yield common.relative_to(local_box).moved(full.offsets), common.relative_to(local)

    def to_local(self, full: Box) -> Iterator[Box]:
        """Yield the shard's elements of a rectangle of the full tensor, as rectangles of the
        shard."""
        for full_box, local_box in self.boxes():
            common = full_box.intersect(full)
            if common is not None:
                yield common.relative_to(full_box).moved(local_box.offsets)

    def _rows(self, start: int, count: int) -> Box:
        box = Box.full(self.shape)
        return box if self.dim is None else box.replace(self.dim, start, count)
