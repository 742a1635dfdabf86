"""Encoding of values for the exchange between sites. No communication."""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT8_BLOCK, INT4_BLOCK = 256, 64
"""Elements that share a scale: 8.125 and 4.5 bits an element, the scales included."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class FloatCodec:
    """Every value by itself in `dtype`. is_relative, keeps_error: see `Codec`."""

    dtype: torch.dtype
    is_relative: bool
    keeps_error: bool = False

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes of a row of `num_elements` elements."""
        return num_elements * self.dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `values`, rounded to nearest; a view where nothing is rounded."""
        return values.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, codes: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Return the values of `codes`; a view where the codes are float32."""
        values = codes.view(self.dtype).float()
        assert values.shape[1] == num_elements
        return values

    def is_canonical(self, codes: torch.Tensor, num_elements: int) -> bool:
        """Return whether all values are finite."""
        return bool(is_finite(codes.view(self.dtype)))


@dataclass(frozen=True)
class BlockCodec:
    """Integers of `bits` (8 or 4) in blocks of `block` elements with a float32 scale each.

    The scale is the block's largest magnitude over ``2^(bits-1) - 1``, so a value is off by half a
    scale at most. A row is its scales, then its integers (two to a byte for 4 bits, the first in
    the low half), filled up to a multiple of 4 bytes. A block with a value that is not finite
    decodes to values that are not finite.
    """

    bits: int
    block: int
    is_relative: bool = True
    keeps_error: bool = True

    @property
    def levels(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def num_bytes(self, num_elements: int) -> int:
        """Return the bytes of a row of `num_elements` elements."""
        integer_bytes = -(-num_elements * self.bits // 8)
        padding_bytes = -integer_bytes % 4
        return _SCALE_BYTES * self.num_blocks(num_elements) + integer_bytes + padding_bytes

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales [R, blocks], float32, and integers [R, N], int8, of `values` [R, N]."""
        rows, num_elements = values.shape
        num_blocks = self.num_blocks(num_elements)
        blocks = torch.zeros(rows, num_blocks * self.block)
        blocks[:, :num_elements] = values
        blocks = blocks.view(rows, num_blocks, self.block)
        scales = blocks.abs().amax(2) / self.levels
        divisors = torch.where(scales == 0, 1, scales).unsqueeze(2)
        # The scale of a block with NaN or infinity is not finite, so its integers do not matter.
        integers = (blocks / divisors).round_().nan_to_num_(0, 0, 0).to(torch.int8)
        return scales, integers.view(rows, -1)[:, :num_elements]

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `values`, rounded to nearest."""
        rows, num_elements = values.shape
        scales, integers = self.quantize(values)
        codes = torch.zeros(rows, self.num_bytes(num_elements), dtype=torch.uint8)
        begin = _SCALE_BYTES * scales.shape[1]
        codes[:, :begin] = scales.view(torch.uint8)
        packed = self.pack(integers)
        codes[:, begin : begin + packed.shape[1]] = packed
        return codes

    def decode(self, codes: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Return the values of `codes`: scale times integer."""
        return self.dequantize(*self._split(codes, num_elements))

    def is_canonical(self, codes: torch.Tensor, num_elements: int) -> bool:
        """Return whether scales are finite and not negative, and `quantize` could make the
        integers."""
        scales, integers = self._split(codes, num_elements)
        if not integers.numel():
            return True
        are_scales_valid = is_finite(scales) and bool((scales >= 0).all())
        # The range of `quantize` is symmetric: it never makes the smallest integer, -levels - 1.
        return are_scales_valid and int(integers.min()) >= -self.levels

    def _split(self, codes: torch.Tensor, num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = _SCALE_BYTES * self.num_blocks(num_elements)
        scales = codes[:, :begin].contiguous().view(torch.float32)
        return scales, self.unpack(codes[:, begin:], num_elements)

    def dequantize(self, scales: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        """Return the float32 values [R, N] of the scales and integers of `quantize`."""
        rows, num_elements = integers.shape
        values = torch.zeros(rows, scales.shape[1] * self.block)
        values[:, :num_elements] = integers
        values.view(rows, -1, self.block).mul_(scales.unsqueeze(2))
        return values[:, :num_elements]

    def num_blocks(self, num_elements: int) -> int:
        """Return the blocks of a row of `num_elements` elements."""
        return -(-num_elements // self.block)

    def pack(self, integers: torch.Tensor) -> torch.Tensor:
        """Return the bytes of integers [R, N]."""
        if self.bits == 8:
            return integers.contiguous().view(torch.uint8)
        nibbles = (integers & 15).view(torch.uint8)
        if nibbles.shape[1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)

    def unpack(self, codes: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Return the integers [R, num_elements], int8, of the bytes of `pack`."""
        if self.bits == 8:
            return codes[:, :num_elements].contiguous().view(torch.int8)
        codes = codes[:, : -(-num_elements // 2)]
        nibbles = torch.stack([codes & 15, codes >> 4], 2).view(len(codes), -1)[:, :num_elements]
        return (nibbles.to(torch.int8) ^ 8) - 8  # sign-extends the fourth bit


def is_finite(values: torch.Tensor) -> bool:
    """Return whether no value is NaN or an infinity; reads them once and copies nothing."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())


Codec = FloatCodec | BlockCodec
"""Encoding of rows of values [R, N] as bytes [R, num_bytes(N)], the same on every machine.

is_relative: whether the values are differences to the global weights, which are the same on all
sites before an outer step; else they are the weights themselves. keeps_error: whether the rounding
error is added to the next values (error feedback).
"""

CODECS: dict[str, Codec] = {
    # Absolute, so that nothing is rounded.
    "float32": FloatCodec(torch.float32, is_relative=False),
    # Absolute weights would lose 16 bits.
    "bfloat16": FloatCodec(torch.bfloat16, is_relative=True),
    "int8": BlockCodec(8, INT8_BLOCK),
    "int4": BlockCodec(4, INT4_BLOCK),
}


def sent_bytes(num_elements: int, num_sites: int, codec: str) -> int:
    """Return the bytes that one rank sends to exchange `num_elements` at once, without headers.

    It sends ``S - 1`` parts of ``ceil(N / S)`` elements to the ranks that take their means, and the
    mean of one part to ``S - 1`` ranks. It receives as many.
    """
    part_size = -(-num_elements // num_sites)
    return 2 * (num_sites - 1) * CODECS[codec].num_bytes(part_size)
