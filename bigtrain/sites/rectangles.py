"""Rectangles of full parameters: the coordinates of weights between sites and an outer server,
whatever their layouts. No communication."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.sites.codecs import BlockCodec, Codec, FloatCodec


@dataclass(frozen=True)
class Box:
    """A rectangle of the parameter `name`."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    def of(self, tensor: torch.Tensor, whole: Box | None = None) -> torch.Tensor:
        """Return a view of the rectangle, of a tensor that is shaped like the parameter, or like
        the rectangle `whole` around it."""
        firsts = whole.offsets if whole else (0,) * len(self.offsets)
        where = zip(self.offsets, firsts, self.sizes, strict=True)
        return tensor[tuple(slice(o - first, o - first + size) for o, first, size in where)]

    def common(self, other: Box) -> Box | None:
        """Return the intersection with a rectangle of the same parameter; None if it is empty."""
        edges = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ranges = [(max(a, b), min(a + m, b + n)) for a, m, b, n in edges]
        if any(begin >= end for begin, end in ranges):
            return None
        offsets = tuple(begin for begin, _ in ranges)
        return Box(self.name, offsets, tuple(end - begin for begin, end in ranges))

    def difference(self, inner: Box) -> Iterator[Box]:
        """Yield rectangles that cover all but `inner`, which is inside this one."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (first, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
            end = offsets[dim] + sizes[dim]
            for begin, stop in ((offsets[dim], first), (first + size, end)):
                if begin < stop:
                    yield Box(
                        self.name,
                        (*offsets[:dim], begin, *offsets[dim + 1 :]),
                        (*sizes[:dim], stop - begin, *sizes[dim + 1 :]),
                    )
            offsets[dim], sizes[dim] = first, size

    def split(self, most: int) -> Iterator[Box]:
        """Yield the rectangle in pieces of at most `most` elements."""
        if self.count <= most:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        size = self.sizes[dim] // 2
        first = Box(self.name, self.offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]))
        for half in (first, *self.difference(first)):
            yield from half.split(most)

    def to_json(self) -> list[Any]:
        """Return JSON values."""
        return [self.name, self.offsets, self.sizes]

    @classmethod
    def from_json(cls, tree: Any, shapes: dict[str, tuple[int, ...]]) -> Box:
        """Return the rectangle of JSON values. Raises ValueError for what is not inside one of the
        parameters with these `shapes`."""
        try:
            name, offsets, sizes = tree
            box = cls(str(name), tuple(map(int, offsets)), tuple(map(int, sizes)))
            shape = shapes[box.name]
            edges = zip(box.offsets, box.sizes, shape, strict=True)
            is_inside = all(0 <= o and 0 < n and o + n <= whole for o, n, whole in edges)
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"no rectangle of a parameter: {tree!r}") from error
        if not is_inside:
            raise ValueError(f"outside of {name}, which is {list(shape)}: {tree!r}")
        return box


class Update:
    """An update of a whole parameter as it travels: encoded once, in blocks of its own flat order,
    so that any rectangle of it means the same values on every site.

    values: float32, what it decodes to, shaped like the parameter.
    """

    def __init__(self, codec: Codec, update: torch.Tensor) -> None:
        self._shape = tuple(update.shape)
        self._scales: torch.Tensor | None = None
        if isinstance(codec, BlockCodec):
            scales, integers = codec.quantize(update.reshape(1, -1))
            self._scales, self._elements = scales[0], integers.reshape(self._shape)
            self.values = codec.dequantize(scales, integers).reshape(self._shape)
        else:
            self._elements = update.to(codec.dtype)
            self.values = self._elements.float()
        self._codec = codec

    def cut(self, box: Box) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what is sent of a rectangle: its elements, flat, and the scales of the blocks that
        it touches."""
        elements = box.of(self._elements).reshape(-1)
        if not isinstance(self._codec, BlockCodec) or self._scales is None:
            return elements, None
        touched, _ = touched_blocks(self._shape, box, self._codec.block)
        return elements, self._scales[touched]


def touched_blocks(
    shape: tuple[int, ...], box: Box, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of a flat tensor of `shape` in which `box` has elements, ascending; and for
    each element of the box the index of its block among them."""
    first = _flat_range(shape, box)
    if first is not None:
        blocks = torch.arange(first, first + box.count) // block
        return torch.arange(int(blocks[0]), int(blocks[-1]) + 1), blocks - blocks[0]
    index = torch.zeros((), dtype=torch.int64)
    for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True):
        index = index.unsqueeze(-1) * whole + torch.arange(offset, offset + size)
    touched, places = torch.unique(index.reshape(-1) // block, return_inverse=True)
    return touched, places


def _flat_range(shape: tuple[int, ...], box: Box) -> int | None:
    """Return the first element of the box in the flat tensor, if it is a range of it."""
    sizes = list(box.sizes)
    while sizes and sizes[0] == 1:
        sizes.pop(0)
    inner = len(sizes) - 1
    if inner > 0 and tuple(sizes[1:]) != shape[-inner:]:
        return None
    index = 0
    for offset, whole in zip(box.offsets, shape, strict=True):
        index = index * whole + offset
    return index


def join_cuts(codec: Codec, cuts: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> bytes:
    """Return the payload for several rectangles: all elements, then all scales."""
    elements = torch.cat([one for one, _ in cuts])
    if isinstance(codec, BlockCodec):
        packed = codec.pack(elements.unsqueeze(0))[0]
        scales = torch.cat([scale for _, scale in cuts if scale is not None])
        return packed.numpy().tobytes() + scales.numpy().tobytes()
    return elements.view(torch.uint8).numpy().tobytes()


def split_cuts(
    codec: Codec, payload: memoryview, boxes: Sequence[tuple[Box, tuple[int, ...]]]
) -> torch.Tensor:
    """Return the float32 values, flat, of which `join_cuts` made the payload. boxes: each with its
    parameter's shape.

    Raises ValueError for a payload of another length.
    """
    counts = [box.count for box, _ in boxes]
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if isinstance(codec, FloatCodec):
        _refuse_length(raw, sum(counts) * codec.dtype.itemsize)
        return raw.view(codec.dtype).float()
    touched, places = zip(
        *(touched_blocks(shape, box, codec.block) for box, shape in boxes), strict=True
    )
    length = -(-sum(counts) * codec.bits // 8)
    num_scales = [len(blocks) for blocks in touched]
    _refuse_length(raw, length + 4 * sum(num_scales))
    integers = codec.unpack(raw[:length].unsqueeze(0), sum(counts))[0].split(counts)
    scales = raw[length:].clone().view(torch.float32).split(num_scales)
    cuts = zip(integers, scales, places, strict=True)
    return torch.cat([elements * scale[place] for elements, scale, place in cuts])


def _refuse_length(raw: torch.Tensor, expected: int) -> None:
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes where {expected} were expected")
