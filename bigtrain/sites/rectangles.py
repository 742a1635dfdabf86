"""Rectangles of full parameters: the coordinates of weights between sites and an outer server,
whatever their layouts. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from bigtrain.sites.codecs import BlockCodec, Codec, FloatCodec
from bigtrain.system.boxes import Box


@dataclass(frozen=True)
class ParameterBox(Box):
    """Rectangle of the parameter `name`."""

    name: str

    def to_json(self) -> list[Any]:
        """Return JSON values."""
        return [self.name, self.offsets, self.sizes]

    @classmethod
    def from_json(cls, tree: Any, shapes: dict[str, tuple[int, ...]]) -> ParameterBox:
        """Return the rectangle of JSON values. Raises ValueError for what is not inside one of the
        parameters with these `shapes`."""
        try:
            name, offsets, sizes = tree
            box = cls(tuple(map(int, offsets)), tuple(map(int, sizes)), str(name))
            shape = shapes[box.name]
            is_inside = box.intersect(Box.full(shape)) == box
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"no rectangle of a parameter: {tree!r}") from error
        if not is_inside:
            raise ValueError(f"outside of {name}, which is {list(shape)}: {tree!r}")
        return box


class EncodedRectangle(NamedTuple):
    """Elements of a rectangle, flat, and the scales of the blocks that it touches (None for a codec
    without scales)."""

    elements: torch.Tensor
    scales: torch.Tensor | None


class Update:
    """Update of a full parameter as it is sent: encoded once, in blocks of the parameter's flat
    order, so that a rectangle decodes to equal values on every site.

    values: the decoded update, float32, shaped like the parameter.
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

    def cut(self, box: ParameterBox) -> EncodedRectangle:
        """Return the part of the update that is sent for a rectangle."""
        elements = self._elements[box.slices].reshape(-1)
        if not isinstance(self._codec, BlockCodec) or self._scales is None:
            return EncodedRectangle(elements, None)
        touched, _ = touched_blocks(self._shape, box, self._codec.block)
        return EncodedRectangle(elements, self._scales[touched])


def touched_blocks(
    shape: tuple[int, ...], box: ParameterBox, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of a flat tensor of `shape` in which `box` has elements, ascending; and for
    each element of the box the index of its block in this list."""
    if box.is_flat_range(shape):
        first, last = box.flat_ends(shape)
        blocks = torch.arange(first, last + 1) // block
        first_block, last_block = first // block, last // block
        return torch.arange(first_block, last_block + 1), blocks - first_block
    # Flat indices of the elements of the box, built up by one dimension at a time.
    indices = torch.zeros((), dtype=torch.int64)
    for offset, size, dimension in zip(box.offsets, box.sizes, shape, strict=True):
        indices = indices.unsqueeze(-1) * dimension + torch.arange(offset, offset + size)
    touched, block_index = torch.unique(indices.reshape(-1) // block, return_inverse=True)
    return touched, block_index


def join_rectangles(codec: Codec, rectangles: Sequence[EncodedRectangle]) -> bytes:
    """Return the payload for several rectangles: all elements, then all scales."""
    elements = torch.cat([rectangle.elements for rectangle in rectangles])
    if isinstance(codec, BlockCodec):
        integer_bytes = codec.pack(elements.unsqueeze(0))[0]
        scales = torch.cat([r.scales for r in rectangles if r.scales is not None])
        return integer_bytes.numpy().tobytes() + scales.numpy().tobytes()
    return elements.view(torch.uint8).numpy().tobytes()


def decode_rectangles(
    codec: Codec, payload: memoryview, boxes: Sequence[tuple[ParameterBox, tuple[int, ...]]]
) -> torch.Tensor:
    """Return the float32 values, flat, of which `join_rectangles` made the payload. boxes: each
    with its parameter's shape. Raises ValueError for a payload of another length."""
    counts = [box.num_elements for box, _ in boxes]
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if isinstance(codec, FloatCodec):
        _refuse_length(raw, sum(counts) * codec.dtype.itemsize)
        return raw.view(codec.dtype).float()
    touched, block_indices = zip(
        *(touched_blocks(shape, box, codec.block) for box, shape in boxes), strict=True
    )
    # The integers of every rectangle, then the scales of every rectangle.
    num_scales = [len(blocks) for blocks in touched]
    integer_bytes = -(-sum(counts) * codec.bits // 8)
    _refuse_length(raw, integer_bytes + 4 * sum(num_scales))
    integers = codec.unpack(raw[:integer_bytes].unsqueeze(0), sum(counts))[0].split(counts)
    scales = raw[integer_bytes:].clone().view(torch.float32).split(num_scales)
    rectangles = zip(integers, scales, block_indices, strict=True)
    return torch.cat([values * scale[block_index] for values, scale, block_index in rectangles])


def _refuse_length(raw: torch.Tensor, expected: int) -> None:
    if len(raw) != expected:
        raise ValueError(f"{len(raw)} bytes where {expected} were expected")
