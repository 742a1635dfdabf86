"""Downsampling of any number of steps to a bounded number of buckets that keep all extremes.

A bucket covers `width` consecutive rows, and keeps minimum, maximum and mean of each series.
When the maximum number of buckets is reached, pairs are merged: memory does not depend on the
number of rows, and a spike in one step stays visible among a million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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

    width: rows of a bucket; the last one may have fewer. first, last: positions of each bucket's
    first and last row, by name of the position. series: by name.
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
        self._num = 0  # complete buckets
        self._cached: Reduced | None = None  # the last result of `reduced`, until rows are added
        self._first = {name: np.zeros(max_buckets) for name in positions}
        self._last = {name: np.zeros(max_buckets) for name in positions}
        self._series: dict[str, _Series] = {}
        # Rows that do not fill a bucket yet.
        self._rest = {name: np.empty(0) for name in positions}
        self._rest_series: dict[str, Column] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of the series so far, in the order of their first appearance."""
        return list(self._series)

    def add(self, positions: Mapping[str, Column], series: Mapping[str, Column]) -> None:
        """Append rows. All columns have the same length; NaN means "no value"."""
        self._cached = None
        count = len(next(iter(positions.values())))
        held = len(next(iter(self._rest.values())))
        self.num_rows += count
        for name in series:
            if name not in self._series:
                self._series[name] = _Series(self._max)
        places = {
            name: np.concatenate([rest, positions[name]]) for name, rest in self._rest.items()
        }
        rows = {
            name: np.concatenate(
                [
                    self._rest_series.get(name, np.full(held, np.nan)),
                    series.get(name, np.full(count, np.nan)),
                ]
            )
            for name in self._series
        }
        begin, total = 0, held + count
        while total - begin >= self.width:
            room = self._max - self._num
            taken = min(room, (total - begin) // self.width)
            self._store(places, rows, begin, taken)
            begin += taken * self.width
            if self._num == self._max:
                self._merge()
        # Copies: views would keep the whole block.
        self._rest = {name: column[begin:].copy() for name, column in places.items()}
        self._rest_series = {name: column[begin:].copy() for name, column in rows.items()}

    def reduced(self, since: int = 0) -> Reduced:
        """Return the buckets from index `since` on; an incomplete bucket is the last one.

        A view that the next `add` may change.
        """
        if since == 0 and self._cached is not None:
            return self._cached
        held = len(next(iter(self._rest.values())))
        num = self._num
        first = {name: column[since:num] for name, column in self._first.items()}
        last = {name: column[since:num] for name, column in self._last.items()}
        series = {name: one.values(since, num) for name, one in self._series.items()}
        if held:
            first = {k: np.append(first[k], rest[0]) for k, rest in self._rest.items()}
            last = {k: np.append(last[k], rest[-1]) for k, rest in self._rest.items()}
            for name, one in series.items():
                parts = _reduce(self._rest_series[name].reshape(1, held))
                series[name] = Bucketed(
                    np.append(one.minimum, parts[0]),
                    np.append(one.maximum, parts[1]),
                    np.append(one.mean, _mean(parts[2], parts[3])),
                )
        reduced = Reduced(self.width, first, last, series, self.num_rows)
        if since == 0:
            self._cached = reduced
        return reduced

    @property
    def num_complete(self) -> int:
        """Number of complete buckets; more rows change them only if `width` changes."""
        return self._num

    def _store(
        self, places: Mapping[str, Column], rows: Mapping[str, Column], begin: int, taken: int
    ) -> None:
        end, width, num = begin + taken * self.width, self.width, self._num
        for name, column in places.items():
            self._first[name][num : num + taken] = column[begin:end:width]
            self._last[name][num : num + taken] = column[begin + width - 1 : end : width]
        for name, column in rows.items():
            self._series[name].store(num, _reduce(column[begin:end].reshape(taken, width)))
        self._num += taken

    def _merge(self) -> None:
        """Merge pairs of buckets."""
        half = self._num // 2
        for name in self._first:
            self._first[name][:half] = self._first[name][: self._num : 2].copy()
            self._last[name][:half] = self._last[name][1 : self._num : 2].copy()
        for one in self._series.values():
            one.merge(half)
        self._num = half
        self.width *= 2


class _Series:
    """Minimum, maximum, sum and number of values of each bucket."""

    def __init__(self, size: int) -> None:
        self._minimum = np.full(size, np.nan)
        self._maximum = np.full(size, np.nan)
        self._sum = np.zeros(size)
        self._count = np.zeros(size)

    def store(self, begin: int, parts: tuple[Column, Column, Column, Column]) -> None:
        end = begin + len(parts[0])
        self._minimum[begin:end], self._maximum[begin:end] = parts[0], parts[1]
        self._sum[begin:end], self._count[begin:end] = parts[2], parts[3]

    def merge(self, half: int) -> None:
        for column, join in (
            (self._minimum, np.fmin),
            (self._maximum, np.fmax),
            (self._sum, np.add),
            (self._count, np.add),
        ):
            column[:half] = join(column[: 2 * half : 2], column[1 : 2 * half : 2])

    def values(self, begin: int, end: int) -> Bucketed:
        return Bucketed(
            self._minimum[begin:end],
            self._maximum[begin:end],
            _mean(self._sum[begin:end], self._count[begin:end]),
        )


def _reduce(rows: NDArray[np.float64]) -> tuple[Column, Column, Column, Column]:
    """Return minimum, maximum, sum and number of the finite values of each row of a matrix."""
    if rows.shape[1] == 1:
        known = ~np.isnan(rows[:, 0])
        value = rows[:, 0]
        return value, value, np.where(known, value, 0.0), known.astype(np.float64)
    known = ~np.isnan(rows)
    return (
        np.fmin.reduce(rows, axis=1),
        np.fmax.reduce(rows, axis=1),
        np.where(known, rows, 0.0).sum(axis=1),
        known.sum(axis=1).astype(np.float64),
    )


def _mean(total: Column, count: Column) -> Column:
    result = np.full(len(total), np.nan)
    np.divide(total, count, out=result, where=count > 0)
    return result
