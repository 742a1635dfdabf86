"""Which pairs of tokens the pieces of a ring's blocks cover."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.models.parallel import ring_plan
from bigtrain.models.parallel.ring_plan import Range, RingPlan, chunks_of, tokens_of
from tests.support.tiers import examples


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, list[list[int]], int | None]:
    """Size of a ring, length of samples, edges of their documents, and a window."""
    size = draw(st.integers(1, 4))
    length = 2 * size * draw(st.integers(1, 8))
    inner = st.sets(st.integers(1, length - 1), max_size=4)
    edges = [sorted({0, length, *draw(inner)}) for _ in range(draw(st.integers(1, 2)))]
    return size, length, edges, draw(st.none() | st.integers(1, length))


@settings(max_examples=examples(200), deadline=None)
@given(plans())
def test_each_visible_pair_is_in_one_piece(
    plan: tuple[int, int, list[list[int]], int | None],
) -> None:
    size, length, edges, window = plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_plan, "TILE", 4)
        blocks = RingPlan(size, length, edges, window)
        for rank in range(size):
            for source in range(size):
                counts, expected = _counted(blocks, rank, source, edges, window)
                assert torch.equal(counts, expected)


def _counted(
    plan: RingPlan, rank: int, source: int, edges: list[list[int]], window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return in how many pieces each pair is visible [samples, queries, keys], and whether it
    should be."""
    queries, keys = (_positions(chunks_of(plan.length, plan.ring_size, r)) for r in (rank, source))
    block = plan.block(rank, source)
    columns = torch.tensor(_positions(block.columns), dtype=torch.int64)
    counts = torch.zeros(len(edges), len(queries), sum(chunk_sizes(plan)), dtype=torch.int64)
    for piece in block.pieces:
        row, column = torch.arange(piece.num_rows)[:, None], torch.arange(piece.num_columns)
        distance = piece.diagonal + row - column
        visible = (distance >= 0) & (distance < (window or plan.length))
        assert not piece.is_full or visible.all()
        assert not piece.is_causal or torch.equal(visible, row >= column)
        piece_columns = columns[piece.columns[0] : piece.columns[1]]
        for sample in range(*piece.samples):
            rows = torch.arange(*piece.rows)
            counts[sample, rows[:, None], piece_columns] += visible.long()
    place = torch.tensor([[bisect_right(e, p) for p in range(plan.length)] for e in edges])
    query, key = torch.tensor(queries)[:, None], torch.tensor(keys)
    near = (query >= key) & (query - key < (window or plan.length))
    return counts, (near & (place[:, query] == place[:, None, key])).long()


def chunk_sizes(plan: RingPlan) -> list[int]:
    return [stop - start for start, stop in chunks_of(plan.length, plan.ring_size, 0)]


def _positions(ranges: Sequence[Range]) -> list[int]:
    return [token for start, stop in ranges for token in range(start, stop)]


@pytest.mark.parametrize("ring", [1, 3])
def test_causal_work_is_the_same_on_every_rank(ring: int) -> None:
    length = 24 * ring
    plan = RingPlan(ring, length, [[0, length]], None)
    work = []
    for rank in range(ring):
        pieces = [p for source in range(ring) for p in plan.block(rank, source).pieces]
        full = sum(p.num_rows * p.num_columns for p in pieces if p.is_full)
        half = sum(p.num_rows * (p.num_rows + 1) // 2 for p in pieces if not p.is_full)
        work.append(full + half)
    assert len(set(work)) == 1
    assert sum(work) == length * (length + 1) // 2


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (4, 1), (1, 3), (3, 2)])
def test_every_token_has_one_rank(ulysses: int, ring: int) -> None:
    length = 12 * ulysses * ring
    ranks = [_positions(tokens_of(length, ulysses, ring, r)) for r in range(ulysses * ring)]
    assert sorted(token for rank in ranks for token in rank) == list(range(length))
    assert len({len(rank) for rank in ranks}) == 1
    for place in range(ring):
        group = ranks[place * ulysses : (place + 1) * ulysses]
        joined = [token for tokens in group for token in tokens]
        assert joined == _positions(chunks_of(length, ring, place))


def test_windows_and_documents_need_few_keys() -> None:
    """A window of 8 sees 7 keys of the chunk before; a document that ends with a chunk none."""
    windowed = RingPlan(2, 64, [[0, 64]], 8)
    assert windowed.block(1, 0).num_columns == 7
    apart = RingPlan(2, 64, [[0, 16, 32, 48, 64]], None)
    assert apart.block(1, 0) == ring_plan.RingBlock((), ())
