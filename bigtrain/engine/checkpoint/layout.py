"""Writers of the parts of a checkpoint's tensors, in a few numbers per parameter.

ZeRO-3 splits every parameter into as many parts as there are replicas. A list of parts would have
replicas x parameters entries; here one row per parameter and tensor-parallel rank describes "equal
ranges of so many elements". Parts that are not split evenly have a row each; there are about as
many as parameters plus ranks. With it a reader opens only the files that it needs. The layout is a
hint: the files' headers verify what is read. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """Tensor-parallel shard of a parameter, like `bigtrain.models.parallel.sharding.Shard`.

    shape: of the full parameter. ranges: [start, stop) along `dim`, in their order in the shard,
    which holds `local_size` rows of it; `dim` is None for the full parameter.
    """

    shape: Numbers
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    local_size: int = 0

    def flat_ranges(self, offsets: Numbers, sizes: Numbers) -> Iterator[tuple[int, int]]:
        """First and last flat position in the shard of its overlap with a rectangle of the full
        parameter; one pair for each of `ranges` that the rectangle touches."""
        if self.dim is None:
            yield _ends(self.shape, offsets, sizes)
            return
        dim, begin = self.dim, 0
        local = (*self.shape[:dim], self.local_size, *self.shape[dim + 1 :])
        for start, stop in self.ranges:
            low, high = max(offsets[dim], start), min(offsets[dim] + sizes[dim], stop)
            if low < high:
                there = (*offsets[:dim], begin + low - start, *offsets[dim + 1 :])
                yield _ends(local, there, (*sizes[:dim], high - low, *sizes[dim + 1 :]))
            begin += stop - start


def _ends(shape: Numbers, offsets: Numbers, sizes: Numbers) -> tuple[int, int]:
    first = last = 0
    for size, offset, count in zip(shape, offsets, sizes, strict=True):
        first, last = first * size + offset, last * size + offset + count - 1
    return first, last


@dataclass(frozen=True)
class Row:
    """Writers of a shard of the tensor `key`, or of a flat range of one.

    `ranks` hold equal ranges of `count` elements, one after the other from element `start` on, the
    last of them short.
    """

    key: str
    cut: Cut
    ranks: Numbers
    start: int
    count: int

    def writers(self, offsets: Numbers, sizes: Numbers) -> set[int]:
        """Return the ranks that wrote a rectangle of the full tensor, and perhaps a few more."""
        writers: set[int] = set()
        for first, last in self.cut.flat_ranges(offsets, sizes):
            low = max(0, (first - self.start) // self.count)
            high = min(len(self.ranks) - 1, (last - self.start) // self.count)
            writers.update(self.ranks[low : high + 1])
        return writers


@dataclass(frozen=True)
class Layout:
    """Rows of a checkpoint by the key of their tensors."""

    rows: dict[str, list[Row]] = field(default_factory=dict)

    def writers(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> set[int]:
        """Return the ranks that wrote some of a rectangle of tensor `key`, and perhaps a few
        more."""
        box = tuple(offsets), tuple(sizes)
        return {rank for row in self.rows.get(key, ()) for rank in row.writers(*box)}

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values; shared values are stored once."""
        groups: dict[Numbers, int] = {}
        cuts: dict[Cut, int] = {}
        tensors = {
            key: [
                (
                    cuts.setdefault(row.cut, len(cuts)),
                    groups.setdefault(row.ranks, len(groups)),
                    row.start,
                    row.count,
                )
                for row in rows
            ]
            for key, rows in self.rows.items()
        }
        shards = [(cut.shape, cut.dim, cut.ranges, cut.local_size) for cut in cuts]
        return {"format": FORMAT, "groups": list(groups), "cuts": shards, "tensors": tensors}


def merge(rows: Iterable[Row]) -> Layout:
    """Return the layout of all ranks' rows together."""
    rows_by_key: dict[str, list[Row]] = {}
    for row in rows:
        rows_by_key.setdefault(row.key, []).append(row)
    return Layout(dict(sorted(rows_by_key.items())))


def parse_layout(text: bytes) -> Layout:
    """Parse the JSON of `Layout.to_json`. Raises ValueError."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}, this is {FORMAT}")
        groups = [tuple(map(int, group)) for group in document["groups"]]
        cuts = [
            Cut(tuple(shape), dim, tuple((low, high) for low, high in ranges), local_size)
            for shape, dim, ranges, local_size in document["cuts"]
        ]
        rows = {
            key: [
                Row(key, cuts[cut], groups[group], int(start), max(1, int(count)))
                for cut, group, start, count in entries
            ]
            for key, entries in document["tensors"].items()
        }
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return Layout(rows)
