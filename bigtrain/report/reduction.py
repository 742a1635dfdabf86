"""Downsampling of any number of steps to a bounded number of buckets that keep all extremes.

A bucket covers `width` consecutive rows, and keeps minimum, maximum and mean of every series.
When the maximum number of buckets is reached, pairs are merged: memory does not depend on the
number of rows, and a spike in one step stays visible among a million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

MAX_BUCKETS = 1 << 15
"""Limit for a single run: eight buckets per pixel of a 4K screen."""


@dataclass(frozen=True)
class Bucketed:
    """One series by bucket; NaN if no row of a bucket has a finite value."""

    minimum: Column
    maximum: Column
    mean: Column


@dataclass(frozen=True)
class Reduced:
    """Buckets of a `Reducer`.

    width: rows of a bucket; the last bucket may have fewer. first, last: by name of a position, its
    values at the first and at the last row of the buckets. series: by name.
    """

    width: int
    first: Mapping[str, Column]
    last: Mapping[str, Column]
    series: Mapping[str, Bucketed]
    num_rows: int


class Reducer:
    """Accumulator of rows, block by block.

    Parameters: `positions`, names of the ascending quantities that every row has (its step, the
    tokens trained on); `max_buckets`, an even number.
    """

    def __init__(self, positions: tuple[str, ...], max_buckets: int = MAX_BUCKETS) -> None:
        assert max_buckets % 2 == 0
        self._max = max_buckets
        self.width = 1
        self.num_rows = 0
        self.num_complete = 0  # buckets that more rows change only if `width` changes
        self._cached: Reduced | None = None  # the last result of `reduced`, until rows are added
        self._first = {name: np.zeros(max_buckets) for name in positions}
        self._last = {name: np.zeros(max_buckets) for name in positions}
        self._series: dict[str, _Series] = {}
        # Rows that do not fill a bucket yet.
        self._pending = {name: np.empty(0) for name in positions}
        self._pending_series: dict[str, Column] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of the series so far, in the order of first appearance."""
        return list(self._series)

    def add(self, positions: Mapping[str, Column], series: Mapping[str, Column]) -> None:
        """Append rows. All columns have equal lengths; NaN means "no value"."""
        self._cached = None
        num_added = _num_rows(positions)
        num_pending = _num_rows(self._pending)
        self.num_rows += num_added

        # Append the rows to earlier rows that do not fill a bucket. A series may be new, or absent
        # in this block: rows without it have NaN.
        for name in series:
            if name not in self._series:
                self._series[name] = _Series(self._max)
        position_rows = {
            name: np.concatenate([column, positions[name]])
            for name, column in self._pending.items()
        }
        rows = {
            name: np.concatenate(
                [
                    self._pending_series.get(name, np.full(num_pending, np.nan)),
                    series.get(name, np.full(num_added, np.nan)),
                ]
            )
            for name in self._series
        }

        # Fill buckets; when there are as many as allowed, merge pairs and continue.
        begin, num_rows = 0, num_pending + num_added
        while num_rows - begin >= self.width:
            width, bucket = self.width, self.num_complete
            num_buckets = min(self._max - bucket, (num_rows - begin) // width)
            next_bucket, end = bucket + num_buckets, begin + num_buckets * width
            for name, column in position_rows.items():
                self._first[name][bucket:next_bucket] = column[begin:end:width]
                self._last[name][bucket:next_bucket] = column[begin + width - 1 : end : width]
            for name, column in rows.items():
                matrix = column[begin:end].reshape(num_buckets, width)
                self._series[name].store(bucket, _reduce(matrix))
            begin, self.num_complete = end, next_bucket
            if self.num_complete == self._max:
                num_pairs = self.num_complete // 2
                for name in self._first:
                    self._first[name][:num_pairs] = self._first[name][: self._max : 2].copy()
                    self._last[name][:num_pairs] = self._last[name][1 : self._max : 2].copy()
                for values in self._series.values():
                    values.merge(num_pairs)
                self.num_complete = num_pairs
                self.width *= 2

        # Copies: views would keep the complete block in memory.
        self._pending = {name: column[begin:].copy() for name, column in position_rows.items()}
        self._pending_series = {name: column[begin:].copy() for name, column in rows.items()}

    def reduced(self, since: int = 0) -> Reduced:
        """Return the buckets from index `since` on, with rows that fill no bucket as a last one.

        The result is a view, which the next `add` may change.
        """
        if since == 0 and self._cached is not None:
            return self._cached
        end = self.num_complete
        first = {name: column[since:end] for name, column in self._first.items()}
        last = {name: column[since:end] for name, column in self._last.items()}
        series = {name: buckets.values(since, end) for name, buckets in self._series.items()}
        num_pending = _num_rows(self._pending)
        if num_pending:
            for name, column in self._pending.items():
                first[name] = np.append(first[name], column[0])
                last[name] = np.append(last[name], column[-1])
            for name, bucketed in series.items():
                statistics = _reduce(self._pending_series[name].reshape(1, num_pending))
                series[name] = Bucketed(
                    np.append(bucketed.minimum, statistics.minimum),
                    np.append(bucketed.maximum, statistics.maximum),
                    np.append(bucketed.mean, _mean(statistics.total, statistics.num_values)),
                )
        reduced = Reduced(self.width, first, last, series, self.num_rows)
        if since == 0:
            self._cached = reduced
        return reduced


class _Statistics(NamedTuple):
    """Statistics of the finite values of a series, by bucket; num_values: how many there are."""

    minimum: Column
    maximum: Column
    total: Column
    num_values: Column


class _Series:
    """Minimum, maximum, sum and number of values by bucket."""

    def __init__(self, size: int) -> None:
        self._minimum = np.full(size, np.nan)
        self._maximum = np.full(size, np.nan)
        self._sum = np.zeros(size)
        self._count = np.zeros(size)

    def store(self, begin: int, statistics: _Statistics) -> None:
        """Set the buckets from index `begin` on."""
        end = begin + len(statistics.num_values)
        self._minimum[begin:end] = statistics.minimum
        self._maximum[begin:end] = statistics.maximum
        self._sum[begin:end] = statistics.total
        self._count[begin:end] = statistics.num_values

    def merge(self, num_pairs: int) -> None:
        """Replace the first `num_pairs` buckets by the merged pairs of buckets."""
        for column, join in (
            (self._minimum, np.fmin),
            (self._maximum, np.fmax),
            (self._sum, np.add),
            (self._count, np.add),
        ):
            column[:num_pairs] = join(column[: 2 * num_pairs : 2], column[1 : 2 * num_pairs : 2])

    def values(self, begin: int, end: int) -> Bucketed:
        """Return the buckets from `begin` to before `end`."""
        return Bucketed(
            self._minimum[begin:end],
            self._maximum[begin:end],
            _mean(self._sum[begin:end], self._count[begin:end]),
        )


def _num_rows(columns: Mapping[str, Column]) -> int:
    """Return the length of the columns, which have equal lengths."""
    return len(next(iter(columns.values())))


def _reduce(rows: NDArray[np.float64]) -> _Statistics:
    """Return the statistics of every row of a matrix, whose columns are the rows of a bucket."""
    if rows.shape[1] == 1:  # faster for buckets of a single row
        values = rows[:, 0]
        is_finite = ~np.isnan(values)
        total = np.where(is_finite, values, 0.0)
        return _Statistics(values, values, total, is_finite.astype(np.float64))
    is_finite = ~np.isnan(rows)
    return _Statistics(
        np.fmin.reduce(rows, axis=1),
        np.fmax.reduce(rows, axis=1),
        np.where(is_finite, rows, 0.0).sum(axis=1),
        is_finite.sum(axis=1).astype(np.float64),
    )


def _mean(total: Column, num_values: Column) -> Column:
    """Return the means of buckets; NaN for a bucket without values."""
    mean = np.full(len(total), np.nan)
    np.divide(total, num_values, out=mean, where=num_values > 0)
    return mean
