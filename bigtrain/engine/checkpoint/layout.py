"""Writers of the parts of a checkpoint's tensors, in a few numbers per parameter, so that a reader
opens only the files it needs.

One row per parameter and tensor-parallel rank describes the equal ranges of all replicas. The
layout only selects files: the headers of the files verify what is read. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bigtrain.system.boxes import Box, Numbers, ShardRanges

FORMAT = 1


@dataclass(frozen=True)
class LayoutRow:
    """Writers of a shard of the tensor `key`, or of a flat range of a shard: `ranks` have adjacent
    ranges of `count` elements each, from element `start` on; the last range may be shorter."""

    key: str
    shard: ShardRanges
    ranks: Numbers
    start: int
    count: int

    def writers(self, box: Box) -> set[int]:
        """Return the ranks that wrote a rectangle of the full tensor, and perhaps a few more."""
        writers: set[int] = set()
        for local in self.shard.to_local(box):
            first, last = local.flat_ends(self.shard.local_shape)
            low = max(0, (first - self.start) // self.count)
            high = min(len(self.ranks) - 1, (last - self.start) // self.count)
            writers.update(self.ranks[low : high + 1])
        return writers


@dataclass(frozen=True)
class CheckpointLayout:
    """Rows of a checkpoint by tensor key."""

    rows: dict[str, list[LayoutRow]] = field(default_factory=dict)

    def writers(self, key: str, box: Box) -> set[int]:
        """Return the ranks that wrote some of a rectangle of tensor `key`, and perhaps more."""
        return {rank for row in self.rows.get(key, ()) for rank in row.writers(box)}

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values. Rows refer to shards ("cuts") and groups of ranks by
        index, since many rows share them."""
        shard_indices: dict[ShardRanges, int] = {}
        group_indices: dict[Numbers, int] = {}
        tensors: dict[str, list[tuple[int, int, int, int]]] = {}
        for key, rows in self.rows.items():
            tensors[key] = []
            for row in rows:
                shard_index = shard_indices.setdefault(row.shard, len(shard_indices))
                group_index = group_indices.setdefault(row.ranks, len(group_indices))
                tensors[key].append((shard_index, group_index, row.start, row.count))
        cuts = [(shard.shape, shard.dim, shard.ranges, shard.local_size) for shard in shard_indices]
        return {"format": FORMAT, "groups": list(group_indices), "cuts": cuts, "tensors": tensors}


def merge(rows: Iterable[LayoutRow]) -> CheckpointLayout:
    """Return the layout that contains all ranks' rows."""
    rows_by_key: dict[str, list[LayoutRow]] = {}
    for row in rows:
        rows_by_key.setdefault(row.key, []).append(row)
    return CheckpointLayout(dict(sorted(rows_by_key.items())))


def parse_layout(text: bytes) -> CheckpointLayout:
    """Parse the JSON of `CheckpointLayout.to_json`. Raises ValueError."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}, this is {FORMAT}")
        groups = [tuple(map(int, group)) for group in document["groups"]]
        shards = [
            ShardRanges(tuple(shape), dim, tuple((low, high) for low, high in ranges), local_size)
            for shape, dim, ranges, local_size in document["cuts"]
        ]
        rows = {
            key: [
                LayoutRow(key, shards[cut], groups[group], int(start), max(1, int(count)))
                for cut, group, start, count in entries
            ]
            for key, entries in document["tensors"].items()
        }
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return CheckpointLayout(rows)
