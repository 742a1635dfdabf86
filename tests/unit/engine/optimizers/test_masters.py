"""Cutting flat ranges into rectangles, against numpy's own flat order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigtrain.engine.optimizers.masters import Rectangle, rectangles


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape of one to four dimensions, and a range inside its flat elements."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    begin = draw(st.integers(0, math.prod(shape)))
    end = draw(st.integers(begin, math.prod(shape)))
    return shape, begin, end - begin


@given(ranges())
def test_rectangles_tile_the_range_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, count = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    found = rectangles(shape, start, count)
    assert len(found) <= 2 * len(shape) - 1
    pieces = []
    filled = 0
    for cut in found:
        assert len(cut.offsets) == len(cut.sizes) == len(shape)
        assert all(size > 0 for size in cut.sizes)
        slices = tuple(slice(o, o + s) for o, s in zip(cut.offsets, cut.sizes, strict=True))
        piece = elements[slices]
        assert piece.shape == cut.sizes  # inside the tensor
        assert cut.begin == filled
        assert cut.end - cut.begin == piece.size
        filled = cut.end
        pieces.append(piece.ravel())
    assert filled == count
    joined = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    np.testing.assert_array_equal(joined, np.arange(start, start + count))


@given(ranges(), st.integers(2, 5))
def test_a_partition_covers_the_tensor_once(
    case: tuple[tuple[int, ...], int, int], num_processes: int
) -> None:
    """As ZeRO-3 cuts a parameter: equal parts, the last ones short or empty."""
    shape = case[0]
    total = math.prod(shape)
    capacity = -(-total // num_processes)
    seen = np.zeros(shape, np.int64)
    for rank in range(num_processes):
        start = min(capacity * rank, total)
        for cut in rectangles(shape, start, min(capacity, total - start)):
            slices = tuple(slice(o, o + s) for o, s in zip(cut.offsets, cut.sizes, strict=True))
            seen[slices] += 1
    assert (seen == 1).all()


def test_whole_tensor_is_one_rectangle() -> None:
    assert rectangles((3, 4, 5), 0, 60) == [Rectangle((0, 0, 0), (3, 4, 5), 0, 60)]


def test_whole_rows_are_one_rectangle() -> None:
    assert rectangles((6, 4), 8, 12) == [Rectangle((2, 0), (3, 4), 0, 12)]


def test_most_rectangles() -> None:
    assert rectangles((4, 3, 2), 1, 22) == [
        Rectangle((0, 0, 1), (1, 1, 1), 0, 1),
        Rectangle((0, 1, 0), (1, 2, 2), 1, 5),
        Rectangle((1, 0, 0), (2, 3, 2), 5, 17),
        Rectangle((3, 0, 0), (1, 2, 2), 17, 21),
        Rectangle((3, 2, 0), (1, 1, 1), 21, 22),
    ]


@pytest.mark.parametrize("start", [0, 3, 7])
def test_empty_range_is_nothing(start: int) -> None:
    assert rectangles((7,), start, 0) == []
