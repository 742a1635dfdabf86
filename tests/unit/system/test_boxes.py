"""Rectangles against numpy's own indexing and flat order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.system.boxes import Box, ShardRanges, flat_boxes
from tests.support.tiers import examples

Shape = tuple[int, ...]
shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: Shape) -> Box:
    ranges = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    lows = [min(low, size - 1) for (low, _), size in zip(ranges, shape, strict=True)]
    highs = [max(high, low + 1) for low, (_, high) in zip(lows, ranges, strict=True)]
    return Box(tuple(lows), tuple(high - low for low, high in zip(lows, highs, strict=True)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(shapes)
    return shape, draw(boxes_of(shape)), draw(boxes_of(shape))


def count(shape: Shape) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


@settings(max_examples=examples(100))
@given(pairs())
def test_intersection_and_difference_are_those_of_the_elements(
    case: tuple[Shape, Box, Box],
) -> None:
    shape, one, other = case
    elements = count(shape)
    own, theirs = (set(elements[box.slices].ravel().tolist()) for box in (one, other))
    common = one.intersect(other)
    assert common == other.intersect(one)
    assert (set() if common is None else set(elements[common.slices].ravel().tolist())) == (
        own & theirs
    )
    if common is not None:
        rest = [n for box in one.difference(common) for n in elements[box.slices].flat]
        assert sorted(rest) == sorted(own - theirs)
        inside = elements[one.slices][common.relative_to(one).slices]
        np.testing.assert_array_equal(inside, elements[common.slices])
        assert common.relative_to(one).moved(one.offsets) == common


@settings(max_examples=examples(100))
@given(pairs(), st.integers(1, 40))
def test_a_split_covers_the_box_once_in_small_parts(
    case: tuple[Shape, Box, Box], most: int
) -> None:
    shape, box, _ = case
    seen = np.zeros(shape, np.int64)
    for part in box.split(most):
        assert part.num_elements <= most
        seen[part.slices] += 1
    assert (seen[box.slices] == 1).all()
    assert seen.sum() == box.num_elements


@settings(max_examples=examples(100))
@given(pairs())
def test_flat_ends_and_ranges_are_those_of_numpy(case: tuple[Shape, Box, Box]) -> None:
    shape, box, _ = case
    flat = count(shape)[box.slices].ravel()
    assert box.flat_ends(shape) == (flat[0], flat[-1])
    assert box.is_flat_range(shape) == bool((np.diff(flat) == 1).all())


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Shape, int, int]:
    """A shape, and a range inside its flat elements."""
    shape = draw(shapes)
    begin = draw(st.integers(0, math.prod(shape)))
    end = draw(st.integers(begin, math.prod(shape)))
    return shape, begin, end - begin


@settings(max_examples=examples(100))
@given(ranges())
def test_flat_boxes_tile_the_range_in_order(case: tuple[Shape, int, int]) -> None:
    shape, start, num_elements = case
    boxes = flat_boxes(shape, start, num_elements)
    assert len(boxes) <= 2 * len(shape) - 1
    parts = [count(shape)[box.slices] for box in boxes]
    assert [part.shape for part in parts] == [box.sizes for box in boxes]  # inside the tensor
    assert all(part.size > 0 for part in parts)
    joined = np.concatenate([part.ravel() for part in parts]) if parts else np.empty(0, np.int64)
    np.testing.assert_array_equal(joined, np.arange(start, start + num_elements))


@settings(max_examples=examples(100))
@given(ranges(), st.integers(2, 5))
def test_equal_ranges_of_ranks_cover_the_tensor_once(
    case: tuple[Shape, int, int], world_size: int
) -> None:
    """Split like ZeRO-3 splits a parameter: equal parts, the last ones short or empty."""
    shape = case[0]
    total = math.prod(shape)
    capacity = -(-total // world_size)
    seen = np.zeros(shape, np.int64)
    for rank in range(world_size):
        start = min(capacity * rank, total)
        for box in flat_boxes(shape, start, min(capacity, total - start)):
            seen[box.slices] += 1
    assert (seen == 1).all()


def test_most_flat_boxes() -> None:
    assert flat_boxes((4, 3, 2), 1, 22) == [
        Box((0, 0, 1), (1, 1, 1)),
        Box((0, 1, 0), (1, 2, 2)),
        Box((1, 0, 0), (2, 3, 2)),
        Box((3, 0, 0), (1, 2, 2)),
        Box((3, 2, 0), (1, 1, 1)),
    ]


@pytest.mark.parametrize(
    ("shape", "start", "num_elements", "box"),
    [
        ((3, 4, 5), 0, 60, Box((0, 0, 0), (3, 4, 5))),
        ((6, 4), 8, 12, Box((2, 0), (3, 4))),
    ],
)
def test_full_rows_are_one_box(shape: Shape, start: int, num_elements: int, box: Box) -> None:
    assert flat_boxes(shape, start, num_elements) == [box]


@st.composite
def shards(draw: st.DrawFn) -> ShardRanges:
    """Disjoint ranges in any order, and perhaps padding."""
    shape = draw(shapes)
    dim = draw(st.none() | st.integers(0, len(shape) - 1))
    if dim is None:
        return ShardRanges(shape)
    edges = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=6)))
    spans = draw(st.permutations(list(zip(edges[::2], edges[1::2], strict=False))))
    held = sum(stop - start for start, stop in spans)
    return ShardRanges(shape, dim, tuple(spans), held + draw(st.integers(0, 2)))


@settings(max_examples=examples(100))
@given(shards(), st.data())
def test_boxes_of_a_shard_are_those_of_the_elements_that_it_holds(
    shard: ShardRanges, data: st.DataObject
) -> None:
    full = count(shard.shape)
    local = np.full(shard.local_shape, -1)  # of padding
    for there, here in shard.boxes():
        local[here.slices] = full[there.slices]
    if local.size:
        part = data.draw(boxes_of(shard.local_shape))
        seen = np.full(part.sizes, -1)
        for there, here in shard.to_full(part):
            seen[here.slices] = full[there.slices]
        np.testing.assert_array_equal(seen, local[part.slices])
    wanted = data.draw(boxes_of(shard.shape))
    values = [n for box in shard.to_local(wanted) for n in local[box.slices].flat]
    assert sorted(values) == sorted(
        set(full[wanted.slices].ravel().tolist()) & set(local.ravel().tolist())
    )


def test_a_subclass_keeps_its_other_fields() -> None:
    @dataclass(frozen=True)
    class Named(Box):
        name: str

    box = Named((0, 0), (4, 4), "weight")
    assert box.intersect(Box((1, 1), (9, 2))) == Named((1, 1), (3, 2), "weight")
    assert {part.name for part in box.split(3)} == {"weight"}
