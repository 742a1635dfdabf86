"""Buckets lose no extreme, however the rows come and however many there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.report.reduction import Reducer
from tests.support.tiers import examples

VALUES = st.lists(st.one_of(st.just(np.nan), st.floats(-1e6, 1e6)), min_size=1, max_size=300)
CUTS = st.lists(st.integers(0, 300), max_size=6)


def reduce_in_blocks(values: list[float], cuts: list[int], max_buckets: int) -> Reducer:
    reducer = Reducer(("step",), max_buckets)
    steps = np.arange(1.0, len(values) + 1)
    column = np.array(values, dtype=float)
    for begin, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
        reducer.add({"step": steps[begin:end]}, {"loss": column[begin:end]})
    return reducer


@given(values=VALUES, cuts=CUTS, max_buckets=st.sampled_from([2, 8, 64, 512]))
@settings(max_examples=examples(200))
def test_every_bucket_has_the_extremes_and_mean_of_its_rows(
    values: list[float], cuts: list[int], max_buckets: int
) -> None:
    cuts = sorted(cut for cut in cuts if cut <= len(values))
    reducer = reduce_in_blocks(values, cuts, max_buckets)
    reduced = reducer.reduced()
    loss = reduced.series["loss"]
    assert len(loss.mean) <= max_buckets
    assert reduced.num_rows == len(values)
    begin = 0
    for number, (low, high, mean) in enumerate(
        zip(loss.minimum, loss.maximum, loss.mean, strict=True)
    ):
        rows = np.array(values[begin : begin + reduced.width], dtype=float)
        begin += reduced.width
        assert reduced.first["step"][number] == begin - reduced.width + 1
        assert reduced.last["step"][number] == min(begin, len(values))
        known = rows[~np.isnan(rows)]
        if not len(known):
            assert np.isnan([low, high, mean]).all()
            continue
        assert (low, high) == (known.min(), known.max())
        assert mean == pytest.approx(known.mean(), rel=1e-9, abs=1e-3)
    assert begin >= len(values), "rows that are in no bucket"


def test_as_many_rows_as_buckets_stay_as_they_are() -> None:
    values = [float(n) for n in range(7)]
    reduced = reduce_in_blocks(values, [3], 8).reduced()
    assert reduced.width == 1
    assert reduced.series["loss"].mean.tolist() == values


def test_buckets_from_one_on_are_what_the_reader_lacks() -> None:
    reducer = reduce_in_blocks([1.0, 5.0, 2.0, 4.0, 9.0], [], 4)
    whole, rest = reducer.reduced(), reducer.reduced(since=1)
    assert reducer.width == 2
    assert reducer.num_complete == 2
    assert whole.series["loss"].maximum.tolist() == [5.0, 4.0, 9.0]
    assert rest.series["loss"].maximum.tolist() == [4.0, 9.0]
    assert rest.last["step"].tolist() == [4.0, 5.0]


@pytest.mark.parametrize("max_buckets", [4, 64])
def test_a_series_may_begin_late_and_pause(max_buckets: int) -> None:
    reducer = Reducer(("step",), max_buckets)
    for block in range(6):
        steps = np.arange(3.0) + 3 * block
        series = {"loss": steps}
        if block in (2, 5):
            series["late"] = steps
        reducer.add({"step": steps}, series)
    reduced = reducer.reduced()
    late = reduced.series["late"]
    assert np.nanmin(late.minimum) == 6.0
    assert np.nanmax(late.maximum) == 17.0
    assert np.isnan(late.mean[0]) == (max_buckets == 64)  # of 18 rows, or of 8 in a bucket
    assert len(late.mean) == len(reduced.series["loss"].mean) == len(reduced.last["step"])
