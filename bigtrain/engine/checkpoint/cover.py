"""Whether rectangles cover a tensor, or a part of it, each element once. Imports no torch."""

from __future__ import annotations

import math

_WORD = (1 << 64) - 1


class Cover:
    """Checks in constant memory that rectangles cover a box of `sizes`, each element once.

    Corners of rectangles cancel in pairs, but those of the sum of all rectangles modulo 2: if they
    are the box's own, every element is covered an odd number of times, and by the volume just once.
    Corners that are left are told apart by the exclusive or of their 64-bit hashes.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._volume = 0
        self._corners = 0
        self._dtypes: set[str] = set()
        self._is_odd = False

    def add_part(
        self, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: str
    ) -> None:
        """A rectangle of a tensor of that `shape`, which must be the box's."""
        self._is_odd |= shape != self._sizes
        self.add(offsets, sizes, dtype)

    def add(self, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: str) -> None:
        """A rectangle within the box."""
        self._dtypes.add(dtype)
        self._volume += math.prod(sizes)
        if not self._is_odd:
            self._corners ^= self._hash(offsets, sizes)

    def problem(self) -> str | None:
        """What is wrong with the parts; None if nothing."""
        if self._is_odd or len(self._dtypes) > 1:
            return "different shapes or dtypes"
        if self._volume != math.prod(self._sizes):
            return "parts are missing, or there are too many,"
        whole = self._hash((0,) * len(self._sizes), self._sizes)
        return None if self._corners == whole else "parts overlap, and others are missing,"

    def _hash(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        if 0 in sizes:
            return 0
        corners = [0]
        for whole, low, size in zip(self._sizes, offsets, sizes, strict=True):
            corners = [c * (whole + 1) + end for c in corners for end in (low, low + size)]
        found = 0
        for corner in corners:
            found ^= _mixed(corner)
        return found


def _mixed(number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014), of numbers below 2**64; larger ones are folded."""
    number = (number ^ (number >> 64)) + 0x9E3779B97F4A7C15 & _WORD
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _WORD
    return number ^ (number >> 31)
