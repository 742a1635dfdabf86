"""Laws of the sample order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.samples.shuffle import SampleOrder, permute
from tests.support.tiers import examples

ORDER_OF_TEN = [0, 1, 6, 8, 2, 5, 4, 7, 3, 9, 8, 4, 7, 9, 5, 3, 2, 1, 6, 0]
ORDER_OF_A_TRILLION = [370810206930, 954410505298, 986899092838]

sizes = st.one_of(st.integers(1, 70), st.integers(71, 5000))
seeds = st.integers(0, 2**70)


@settings(max_examples=examples(150))
@given(size=sizes, seed=seeds, epoch=st.integers(0, 5))
def test_an_epoch_has_no_gap_and_no_repeat(size: int, seed: int, epoch: int) -> None:
    windows = SampleOrder(size, seed).windows(epoch * size, size)
    assert windows.dtype == np.int64
    assert sorted(windows.tolist()) == list(range(size))


@settings(max_examples=examples(100))
@given(
    size=sizes,
    seed=seeds,
    first=st.integers(0, 20_000),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_any_division_of_the_range_is_the_same_order(
    size: int, seed: int, first: int, cuts: list[int]
) -> None:
    order = SampleOrder(size, seed)
    position = first
    parts = []
    for count in cuts:
        parts.append(SampleOrder(size, seed).windows(position, count))
        position += count
    whole = order.windows(first, position - first)
    assert np.concatenate([np.empty(0, np.int64), *parts]).tolist() == whole.tolist()


def test_seeds_and_epochs_differ() -> None:
    size = 1000
    orders = {
        tuple(SampleOrder(size, seed).windows(epoch * size, size).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_order_stays_as_it_is() -> None:
    """Written down once: a resumed run must read what the run before did not."""
    assert SampleOrder(10, 0).windows(0, 20).tolist() == ORDER_OF_TEN
    assert SampleOrder(10**12, 7).windows(10**15, 3).tolist() == ORDER_OF_A_TRILLION


@pytest.mark.parametrize("size", [3, 64, 65])
def test_every_position_is_equally_likely(size: int) -> None:
    """Chi-square of where window 0 and the first sample land, over 1,000 seeds."""
    seeds = range(1000)
    of_first = np.array([permute(np.array([0]), size, seed, 0)[0] for seed in seeds])
    counts = np.bincount(of_first, minlength=size)
    expected = len(seeds) / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = size - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_as_far_apart_as_in_a_random_permutation() -> None:
    size = 100_000
    windows = SampleOrder(size, 3).windows(0, size)
    mean_step = np.abs(np.diff(windows)).mean()
    assert mean_step == pytest.approx(size / 3, rel=0.01)
    correlation = np.corrcoef(np.arange(size), windows)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)
