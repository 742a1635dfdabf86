"""Rectangles of full parameters, in which sites speak of weights, to each other or to an outer
server, whatever their layouts. No communication."""

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

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """The rectangle of a tensor that is shaped like the parameter: a view."""
        where = zip(self.offsets, self.sizes, strict=True)
        return full[tuple(slice(begin, begin + size) for begin, size in where)]

    def of_part(self, part: torch.Tensor, whole: Box) -> torch.Tensor:
        """The rectangle of a tensor that is shaped like `whole`, which it lies in: a view."""
        begins = (o - first for o, first in zip(self.offsets, whole.offsets, strict=True))
        where = zip(begins, self.sizes, strict=True)
        return part[tuple(slice(begin, begin + size) for begin, size in where)]

    def common(self, other: Box) -> Box | None:
        """What lies in both, of which `other` is of the same parameter."""
        edges = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        found = [(max(a, b), min(a + m, b + n)) for a, m, b, n in edges]
        if any(begin >= end for begin, end in found):
            return None
        offsets = tuple(begin for begin, _ in found)
        return Box(self.name, offsets, tuple(end - begin for begin, end in found))

    def difference(self, inner: Box) -> Iterator[Box]:
        """What is left when `inner`, which lies in it, is taken out."""
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
        """The rectangle in pieces of at most `most` elements."""
        if self.count <= most:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        size = self.sizes[dim] // 2
        first = Box(self.name, self.offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]))
        for half in (first, *self.difference(first)):
            yield from half.split(most)

    def to_json(self) -> list[Any]:
        """For the header of a message."""
        return [self.name, self.offsets, self.sizes]

    @classmethod
    def from_json(cls, tree: Any, shapes: dict[str, tuple[int, ...]]) -> Box:
        """Raises ValueError for what is not inside one of the parameters with these `shapes`."""
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
            assert isinstance(codec, FloatCodec)
            self._elements = update.to(codec.dtype)
            self.values = self._elements.float()
        self._codec = codec

    def cut(self, box: Box) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is sent of a rectangle: its elements, flat, and the scales of the blocks that it
        touches."""
        elements = box.of(self._elements).reshape(-1)
        if self._scales is None:
            return elements, None
        assert isinstance(self._codec, BlockCodec)
        touched, _ = touched_blocks(self._shape, box, self._codec.block)
        return elements, self._scales[touched]


def touched_blocks(
    shape: tuple[int, ...], box: Box, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of a flat tensor of `shape` in which `box` has elements, ascending; and for each
    element of the box which of them it is in."""
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
    """Where the box begins in the flat tensor, if it is a range of it."""
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
    """The payload for several rectangles: all elements, then all scales."""
    elements = torch.cat([one for one, _ in cuts])
    if isinstance(codec, BlockCodec):
        packed = codec.pack(elements.unsqueeze(0))[0]
        scales = torch.cat([scale for _, scale in cuts if scale is not None])
        return packed.numpy().tobytes() + scales.numpy().tobytes()
    return elements.view(torch.uint8).numpy().tobytes()


def split_cuts(
    codec: Codec, payload: memoryview, boxes: Sequence[tuple[Box, tuple[int, ...]]]
) -> torch.Tensor:
    """The float32 values, flat, that `join_cuts` made of `boxes`, each with its parameter's shape.

    Raises ValueError for a payload of another length.
    """
    count = sum(box.count for box, _ in boxes)
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if isinstance(codec, FloatCodec):
        _refuse_length(raw, count * codec.dtype.itemsize)
        return raw.view(codec.dtype).float()
    assert isinstance(codec, BlockCodec)
    places = [touched_blocks(shape, box, codec.block) for box, shape in boxes]
    length = -(-count * codec.bits // 8)
    _refuse_length(raw, length + 4 * sum(len(touched) for touched, _ in places))
    integers = codec.unpack(raw[:length].unsqueeze(0), count)[0]
    scales = raw[length:].clone().view(torch.float32)
    values, begin, first = torch.empty(count), 0, 0
    for (box, _), (touched, inside) in zip(boxes, places, strict=True):
        end = begin + box.count
        values[begin:end] = integers[begin:end] * scales[first : first + len(touched)][inside]
        begin, first = end, first + len(touched)
    return values


def _refuse_length(raw: torch.Tensor, expected: int) -> None:
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes where {expected} were expected")
