"""Which tokens each rank of a ring has, and which keys its queries see. Pure.

A sample of T tokens is split into ``2 * ring`` equal chunks; rank i of the ring has chunks i and
``2 * ring - 1 - i``, so that every rank has the same number of pairs of tokens under a causal mask
(zigzag, Megatron's context parallelism). The ranks of Ulysses that share a ring rank split its
tokens evenly.

Queries of one rank and keys of another meet in rectangles, each inside one document. What a causal
mask or a sliding window hides is not in them, so a rank that sees no key of another gets none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Range = tuple[int, int]
"""Start and end of consecutive tokens."""

TILE = 512
"""Rows of a rectangle that are computed together where a window ends inside of it."""


def chunks_of(length: int, ring_size: int, ring_rank: int) -> list[Range]:
    """Return the tokens of a sample of `length` that a rank of the ring has, in order."""
    if ring_size == 1:
        return [(0, length)]
    size, rest = divmod(length, 2 * ring_size)
    assert not rest
    return [(i * size, (i + 1) * size) for i in (ring_rank, 2 * ring_size - 1 - ring_rank)]


def tokens_of(length: int, ulysses_size: int, ring_size: int, rank: int) -> list[Range]:
    """Return the tokens of a sample of `length` that a sequence-parallel rank has, in order. `rank`
    is ``ring_rank * ulysses_size + ulysses_rank``."""
    ring_rank, ulysses_rank = divmod(rank, ulysses_size)
    size, rest = divmod(length, ulysses_size * ring_size)
    assert not rest
    first, ranges, passed = ulysses_rank * size, [], 0
    for start, stop in chunks_of(length, ring_size, ring_rank):
        low = max(start, start + first - passed)
        high = min(stop, start + first + size - passed)
        if low < high:
            ranges.append((low, high))
        passed += stop - start
    return ranges


@dataclass(frozen=True)
class AttentionRectangle:
    """Queries and keys that see each other: a rectangle of samples x rows x columns.

    samples, rows: in the queries of a rank. columns: in the keys that it has or has received. A
    query and a key, both counted in the piece, are ``diagonal + row - column`` tokens apart; the
    query sees the key if that is at least 0 and below `window` (None: no limit).
    """

    samples: Range
    rows: Range
    columns: Range
    diagonal: int
    window: int | None

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        farthest = self.diagonal + self.num_rows - 1
        is_near = self.window is None or farthest < self.window
        return self.diagonal - (self.num_columns - 1) >= 0 and is_near

    @property
    def is_causal(self) -> bool:
        """Whether each query sees the keys up to its own, as in a causal mask of equal lengths."""
        is_square = self.diagonal == 0 and self.num_rows == self.num_columns
        return is_square and (self.window is None or self.num_rows <= self.window)

    def seen_from(self, row: int) -> Range:
        """Return the columns that row `row` of the piece sees."""
        last = min(self.num_columns, self.diagonal + row + 1)
        first = 0 if self.window is None else max(0, self.diagonal + row - self.window + 1)
        return first, max(first, last)


@dataclass(frozen=True)
class RingBlock:
    """Work of a rank on the keys of one rank. columns: the keys that it needs, in that rank's
    tokens; `pieces` count them in this order."""

    columns: tuple[Range, ...]
    pieces: tuple[AttentionRectangle, ...]

    @property
    def num_columns(self) -> int:
        return sum(stop - start for start, stop in self.columns)


class RingPlan:
    """Blocks of every pair of ranks of a ring, for the samples of a micro-batch.

    length: tokens of a sample. edges: of each sample, the starts of its documents and its end;
    one entry for all samples with `same_edges`. window: tokens that a token sees, itself among
    them; None for all before it in its document.
    """

    def __init__(
        self,
        ring_size: int,
        length: int,
        edges: Sequence[Sequence[int]],
        window: int | None,
    ) -> None:
        self.ring_size, self.length, self.window = ring_size, length, window
        self._edges = edges
        self._blocks: dict[tuple[int, int], RingBlock] = {}

    @cached_property
    def _samples(self) -> list[tuple[Range, Sequence[int]]]:
        """Samples that have the same documents, and their edges."""
        if all(list(edges) == list(self._edges[0]) for edges in self._edges):
            return [((0, len(self._edges)), self._edges[0])]
        return [((i, i + 1), edges) for i, edges in enumerate(self._edges)]

    def block(self, rank: int, source: int) -> RingBlock:
        """Return the work of the queries of `rank` on the keys of `source`."""
        if (rank, source) not in self._blocks:
            self._blocks[rank, source] = self._make(rank, source)
        return self._blocks[rank, source]

    def _make(self, rank: int, source: int) -> RingBlock:
        numbered: list[tuple[int, AttentionRectangle]] = []
        passed = 0
        for number, keys in enumerate(chunks_of(self.length, self.ring_size, source)):
            row = 0
            for queries in chunks_of(self.length, self.ring_size, rank):
                for samples, edges in self._samples:
                    for rows, columns in _meetings(queries, keys, edges, self.window):
                        piece = AttentionRectangle(
                            samples,
                            (row + rows[0] - queries[0], row + rows[1] - queries[0]),
                            (passed + columns[0] - keys[0], passed + columns[1] - keys[0]),
                            rows[0] - columns[0],
                            self.window,
                        )
                        numbered.append((number, piece))
                row += queries[1] - queries[0]
            passed += keys[1] - keys[0]
        return _gathered(numbered)


def _meetings(
    queries: Range, keys: Range, edges: Sequence[int], window: int | None
) -> Iterator[tuple[Range, Range]]:
    """Yield the rows and columns, as positions in a sample, of each document in which queries of
    one chunk see keys of another."""
    first = bisect_right(edges, max(queries[0], keys[0])) - 1
    last = bisect_left(edges, min(queries[1], keys[1]))
    # A document is in two different chunks only if it has all tokens between them.
    if queries != keys:
        first = bisect_right(edges, queries[0]) - 1
        last = first + 1
    for document in range(first, last):
        start, stop = edges[document], edges[document + 1]
        rows = (max(start, queries[0]), min(stop, queries[1]))
        columns = (max(start, keys[0]), min(stop, keys[1], rows[1]))
        if window is not None:
            columns = (max(columns[0], rows[0] - window + 1), columns[1])
            rows = (rows[0], min(rows[1], columns[1] - 1 + window))
        rows = (max(rows[0], columns[0]), rows[1])
        if rows[0] < rows[1] and columns[0] < columns[1]:
            yield rows, columns


def _gathered(numbered: Sequence[tuple[int, AttentionRectangle]]) -> RingBlock:
    """Return the block of pieces, each with the number of the chunk of its columns: only the
    columns from the first to the last that is needed of each chunk."""
    columns: list[Range] = []
    moves: dict[int, int] = {}
    passed = 0
    for number in sorted({number for number, _ in numbered}):
        own = [piece.columns for n, piece in numbered if n == number]
        hull = (min(start for start, _ in own), max(stop for _, stop in own))
        moves[number] = passed - hull[0]
        passed += hull[1] - hull[0]
        if columns and columns[-1][1] == hull[0]:  # one range, which is read without a copy
            columns[-1] = (columns[-1][0], hull[1])
        else:
            columns.append(hull)
    pieces = [
        part
        for number, piece in numbered
        for part in _without_hidden(
            AttentionRectangle(
                piece.samples,
                piece.rows,
                (piece.columns[0] + moves[number], piece.columns[1] + moves[number]),
                piece.diagonal,
                piece.window,
            )
        )
    ]
    return RingBlock(tuple(columns), tuple(pieces))


def _without_hidden(piece: AttentionRectangle) -> Iterator[AttentionRectangle]:
    """Yield the parts of `piece` that a kernel computes at once: full ones, causal squares, and
    narrow ones at the end of a window."""
    if piece.is_full or piece.is_causal:
        yield piece
        return
    for start in range(0, piece.num_rows, TILE):
        stop = min(start + TILE, piece.num_rows)
        first, early = piece.seen_from(start)
        late, last = piece.seen_from(stop - 1)
        # Columns before `late` leave the window in these rows, those from `enter` on come into it.
        enter = early - 1 if early < last else last
        cuts = [first, late, enter, last] if late <= enter else [first, last]
        for low, high in pairwise(cuts):
            if low < high:
                yield AttentionRectangle(
                    piece.samples,
                    (piece.rows[0] + start, piece.rows[0] + stop),
                    (piece.columns[0] + low, piece.columns[0] + high),
                    piece.diagonal + start - low,
                    piece.window,
                )
