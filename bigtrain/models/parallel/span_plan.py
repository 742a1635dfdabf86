"""Pieces of documents among the tokens of sequence-parallel ranks. Pure.

A rank has one span of consecutive tokens of each sample, or two in a ring. A span is cut where a
document begins; its first piece may continue a document of the span before, on another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bigtrain.models.parallel.ring_plan import Range


@dataclass(frozen=True)
class SpanPiece:
    """Tokens of one document in a span. start: in the flattened tokens of the rank. depth: tokens
    of the document in earlier spans. is_last: whether the span ends with it."""

    row: int
    span: int
    start: int
    length: int
    depth: int
    is_last: bool


@dataclass(frozen=True)
class SpanPlan:
    """Spans of the ranks that share samples, and the documents in them.

    places: ranges of every rank. edges: the starts of the documents of each sample, and its end.
    """

    places: Sequence[Sequence[Range]]
    edges: Sequence[Sequence[int]]

    @property
    def order(self) -> list[tuple[int, int]]:
        """The spans as they follow each other in a sample: rank, and number in the rank."""
        spans = [
            (start, rank, number)
            for rank, ranges in enumerate(self.places)
            for number, (start, _) in enumerate(ranges)
        ]
        return [(rank, number) for _, rank, number in sorted(spans)]

    @property
    def crosses(self) -> bool:
        """Whether any document continues in a later span; every rank knows it."""
        starts = [start for ranges in self.places for start, _ in ranges]
        return any(start not in edges for edges in map(set, self.edges) for start in starts)

    def pieces(self, rank: int) -> list[SpanPiece]:
        """Return the pieces of a rank, in the order of the tokens."""
        tokens_of_row = sum(stop - start for start, stop in self.places[rank])
        pieces = []
        for row, edges in enumerate(self.edges):
            passed = row * tokens_of_row
            for number, (start, stop) in enumerate(self.places[rank]):
                cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
                depth = start - max(edge for edge in edges if edge <= start)
                for cut, next_cut in pairwise(cuts):
                    first = passed + cut - start
                    length, is_last = next_cut - cut, next_cut == stop
                    pieces.append(SpanPiece(row, number, first, length, depth, is_last))
                    depth = 0
                passed += stop - start
        return pieces
