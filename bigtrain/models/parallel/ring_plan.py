"""Tokens of the ranks of a ring, and keys that the ranks' queries see. Pure.

A sample of T tokens is split into ``2 * ring`` equal chunks; rank i of the ring has chunks i and
``2 * ring - 1 - i``, so that ranks have equal numbers of pairs of tokens under a causal mask
(zigzag, Megatron's context parallelism). The ranks of Ulysses that share a ring rank split its
tokens evenly.

Queries of a rank and keys of another rank meet in rectangles inside one document. Rectangles omit
what a causal mask or a sliding window hides, so a rank gets no keys that its queries do not see.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

Range = tuple[int, int]
"""Start and end of consecutive tokens."""

TILE = 512
"""Rows of a rectangle that are computed together where a window ends inside."""


def chunks_of(length: int, ring_size: int, ring_rank: int) -> list[Range]:
    """Return the tokens of a sample of `length` that a rank of the ring has, in order."""
    if ring_size == 1:
        return [(0, length)]
    size, remainder = divmod(length, 2 * ring_size)
    assert not remainder
    return [(i * size, (i + 1) * size) for i in (ring_rank, 2 * ring_size - 1 - ring_rank)]


def tokens_of(length: int, ulysses_size: int, ring_size: int, rank: int) -> list[Range]:
    """Return the tokens of a sample of `length` that a sequence-parallel rank has, in order. `rank`
    is ``ring_rank * ulysses_size + ulysses_rank``."""
    ring_rank, ulysses_rank = divmod(rank, ulysses_size)
    size, remainder = divmod(length, ulysses_size * ring_size)
    assert not remainder
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

    samples, rows: in the queries of a rank. columns: in the keys that the rank has or received. A
    query and a key, both counted in the piece, are ``diagonal + row - column`` tokens apart; the
    query sees the key if the distance is at least 0 and below `window` (None: no limit).
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
        """Whether each query sees the keys up to its position, as in a causal mask of equal
        lengths."""
        is_square = self.diagonal == 0 and self.num_rows == self.num_columns
        return is_square and (self.window is None or self.num_rows <= self.window)

    def seen_from(self, row: int) -> Range:
        """Return the columns that row `row` of the piece sees."""
        last = min(self.num_columns, self.diagonal + row + 1)
        first = 0 if self.window is None else max(0, self.diagonal + row - self.window + 1)
        return first, max(first, last)


@dataclass(frozen=True)
class RingBlock:
    """Work of a rank on the keys of a rank. columns: the needed keys, as tokens of the keys'
    rank; `pieces` count the keys in this order."""

    columns: tuple[Range, ...]
    pieces: tuple[AttentionRectangle, ...]

    @property
    def num_columns(self) -> int:
        return sum(stop - start for start, stop in self.columns)


class RingPlan:
    """Blocks of every pair of ranks of a ring, for the samples of a micro-batch.

    length: tokens of a sample. edges: for every sample, the starts of documents and the end;
    one entry for all samples with `same_edges`. window: number of tokens that a token sees, itself
    among them; None: all earlier tokens of the document.
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
        """Samples with equal documents, and the documents' edges."""
        if all(list(edges) == list(self._edges[0]) for edges in self._edges):
            return [((0, len(self._edges)), self._edges[0])]
        return [((i, i + 1), edges) for i, edges in enumerate(self._edges)]

    def block(self, rank: int, source: int) -> RingBlock:
        """Return the work of the queries of `rank` on the keys of `source`."""
        if (rank, source) in self._blocks:
            return self._blocks[rank, source]

        # Every pair of chunks, in every document; columns count in all tokens of `source`.
        numbered: list[tuple[int, AttentionRectangle]] = []
        column = 0
        for number, keys in enumerate(chunks_of(self.length, self.ring_size, source)):
            row = 0
            for queries in chunks_of(self.length, self.ring_size, rank):
                row_shift, column_shift = row - queries[0], column - keys[0]
                for samples, edges in self._samples:
                    for (row_begin, row_end), (column_begin, column_end) in _meetings(
                        queries, keys, edges, self.window
                    ):
                        piece = AttentionRectangle(
                            samples,
                            (row_begin + row_shift, row_end + row_shift),
                            (column_begin + column_shift, column_end + column_shift),
                            row_begin - column_begin,
                            self.window,
                        )
                        numbered.append((number, piece))
                row += queries[1] - queries[0]
            column += keys[1] - keys[0]
        block = self._blocks[rank, source] = _gathered(numbered)
        return block


def _meetings(
    queries: Range, keys: Range, edges: Sequence[int], window: int | None
) -> Iterator[tuple[Range, Range]]:
    """Yield the rows and columns, as positions in a sample, of every document in which queries of
    one chunk see keys of another."""
    query_begin, query_end = queries
    key_begin, key_end = keys
    # A document is in two different chunks only if it has all tokens between them.
    first = bisect_right(edges, query_begin) - 1
    last = bisect_left(edges, query_end) if queries == keys else first + 1
    for document in range(first, last):
        begin, end = edges[document], edges[document + 1]
        row_begin, row_end = max(begin, query_begin), min(end, query_end)
        column_begin, column_end = max(begin, key_begin), min(end, key_end, row_end)
        if window is not None:
            column_begin = max(column_begin, row_begin - window + 1)
            row_end = min(row_end, column_end - 1 + window)
        row_begin = max(row_begin, column_begin)
        if row_begin < row_end and column_begin < column_end:
            yield (row_begin, row_end), (column_begin, column_end)


def _gathered(numbered: Sequence[tuple[int, AttentionRectangle]]) -> RingBlock:
    """Return the block of pieces that come with the chunk numbers of the columns. It has only the
    columns of a chunk from the first to the last that is needed."""
    # Columns of a chunk move to the place of the chunk's needed columns in the block.
    columns: list[Range] = []
    moves: dict[int, int] = {}
    passed = 0
    for number in sorted({number for number, _ in numbered}):
        chunk_columns = [piece.columns for n, piece in numbered if n == number]
        begin = min(piece_begin for piece_begin, _ in chunk_columns)
        end = max(piece_end for _, piece_end in chunk_columns)
        moves[number] = passed - begin
        passed += end - begin
        if columns and columns[-1][1] == begin:  # one range, which is read without a copy
            columns[-1] = (columns[-1][0], end)
        else:
            columns.append((begin, end))
    pieces = [
        part
        for number, piece in numbered
        for part in _without_hidden(
            replace(
                piece,
                columns=(piece.columns[0] + moves[number], piece.columns[1] + moves[number]),
            )
        )
    ]
    return RingBlock(tuple(columns), tuple(pieces))


def _without_hidden(piece: AttentionRectangle) -> Iterator[AttentionRectangle]:
    """Yield the parts of `piece` that a kernel computes at once: full rectangles, causal squares,
    and narrow rectangles at the end of a window."""
    if piece.is_full or piece.is_causal:
        yield piece
        return
    for start in range(0, piece.num_rows, TILE):
        stop = min(start + TILE, piece.num_rows)
        first, early = piece.seen_from(start)
        late, last = piece.seen_from(stop - 1)
        # Columns before `late` leave the window in these rows, and columns from `enter` on enter.
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
