"""Which ranks exchange what, for layouts that cut a model at random: every element, once a copy."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch

from bigtrain.sites.peers import Layout, Patch, Ranks, overlapping_peers
from bigtrain.sites.rectangles import ParameterBox

SHAPES = {"embed": (13, 6), "cube": (3, 4, 5), "norm": (7,), "single": (1,)}


def cut(box: ParameterBox, draw: random.Random, pieces: int) -> list[ParameterBox]:
    """A rectangle in so many pieces that tile it, or fewer where it is small."""
    boxes = [box]
    for _ in range(pieces):
        whole = draw.choice(boxes)
        dims = [dim for dim, size in enumerate(whole.sizes) if size > 1]
        if not dims:
            continue
        dim = draw.choice(dims)
        size = draw.randint(1, whole.sizes[dim] - 1)
        sizes = (*whole.sizes[:dim], size, *whole.sizes[dim + 1 :])
        first = ParameterBox(whole.offsets, sizes, whole.name)
        boxes.remove(whole)
        boxes += [first, *whole.difference(first)]
    return boxes


def layout(draw: random.Random, ranks: int, copied: Sequence[str]) -> list[list[ParameterBox]]:
    """Every parameter in pieces on random ranks; the `copied` ones as a whole on two as well."""
    boxes_of_ranks: list[list[ParameterBox]] = [[] for _ in range(ranks)]
    for name, shape in SHAPES.items():
        whole = ParameterBox((0,) * len(shape), shape, name)
        holders = list(range(ranks))
        if name in copied and ranks > 1:
            rank = draw.choice(holders)
            holders.remove(rank)
            boxes_of_ranks[rank].append(whole)
        for box in cut(whole, draw, draw.randint(0, 5)):
            boxes_of_ranks[draw.choice(holders)].append(box)
    for of_rank in boxes_of_ranks:
        draw.shuffle(of_rank)
    return boxes_of_ranks


def groups_of(layouts: Sequence[Layout]) -> dict[tuple[int, int], dict[Ranks, list[Patch]]]:
    return {
        (site, rank): overlapping_peers(layouts, site, rank)
        for site, of_site in enumerate(layouts)
        for rank in range(len(of_site))
    }


def counted(boxes: Sequence[ParameterBox]) -> dict[str, torch.Tensor]:
    """How often every element is in one of them."""
    counts_by_name = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in SHAPES.items()}
    for box in boxes:
        counts_by_name[box.name][box.slices].add_(1)
    return counts_by_name


@pytest.mark.parametrize("seed", range(8))
def test_every_element_is_exchanged_by_the_same_ranks_of_all_sites(seed: int) -> None:
    draw = random.Random(seed)
    copied = draw.sample(sorted(SHAPES), draw.randint(0, 3))
    layouts = [layout(draw, draw.randint(1, 4), copied) for _ in range(draw.randint(2, 3))]
    groups_by_rank = groups_of(layouts)
    together: dict[Ranks, list[list[ParameterBox]]] = defaultdict(list)
    for (site, rank), groups in groups_by_rank.items():
        assert list(groups) == sorted(groups)
        for ranks, patches in groups.items():
            assert ranks[site] == rank
            together[ranks].append([patch.box for patch in patches])
            for patch in patches:
                own = layouts[site][rank][patch.index]
                assert own.intersect(patch.box) == patch.box
    # All ranks of a group exchange the same rectangles in the same order.
    for ranks, of_members in together.items():
        assert len(of_members) == len(layouts), ranks
        assert all(boxes == of_members[0] for boxes in of_members)
    # Each element as often as the site with most copies has it, and by each of those.
    exchanged = counted([box for of_members in together.values() for box in of_members[0]])
    held = [counted([box for boxes in of_site for box in boxes]) for of_site in layouts]
    for name, counts in exchanged.items():
        most = torch.stack([of_site[name] for of_site in held]).amax(0)
        assert torch.equal(counts, most), name
    for (site, rank), groups in groups_by_rank.items():
        own = counted([p.box for patches in groups.values() for p in patches])
        for name, counts in counted(layouts[site][rank]).items():
            assert torch.equal(own[name] > 0, counts > 0), name


def test_equal_layouts_meet_rank_by_rank() -> None:
    """Copies included: the second holder of one site with the second of the other."""
    whole = ParameterBox((0,), (7,), "norm")
    halves = [ParameterBox((0, 0), (6, 6), "embed"), ParameterBox((6, 0), (7, 6), "embed")]
    site = [[halves[0], whole], [halves[1], whole]]
    for rank in (0, 1):
        (group,) = overlapping_peers([site, site], 0, rank).items()
        assert group[0] == (rank, rank)
        assert Counter(p.index for p in group[1]) == {0: 1, 1: 1}
