"""Ranks of sites with different layouts that hold common elements. No communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bigtrain.sites.rectangles import ParameterBox

Ranks = tuple[int, ...]
"""One rank of each site, in the order of the sites."""
Layout = Sequence[Sequence[ParameterBox]]
"""The rectangles that each rank of a site exchanges, which do not overlap."""


class _RankBox(NamedTuple):
    """Rectangle `number` in the layout of a site's `rank`."""

    rank: int
    number: int
    box: ParameterBox


class _Common(NamedTuple):
    """A box inside the rectangles `rank_boxes`, one of each site."""

    box: ParameterBox
    rank_boxes: tuple[_RankBox, ...]


class _Cell(NamedTuple):
    """A box without a boundary of a rectangle inside, and the ranks of every site that hold it."""

    box: ParameterBox
    holders: list[Ranks]


@dataclass(frozen=True)
class Patch:
    """A rectangle that a group of ranks exchanges, inside rectangle `index` of this rank's
    layout."""

    index: int
    box: ParameterBox


def overlapping_peers(layouts: Sequence[Layout], site: int, rank: int) -> dict[Ranks, list[Patch]]:
    """Return what `rank` of `site` exchanges, by the ranks that exchange it together, ascending.

    A rectangle that every site holds once is exchanged once. Where a site holds it several times
    (norms of tensor-parallel ranks, tied embeddings), each holder takes part once, with one rank of
    every other site, in turn if that site has fewer. All ranks of a group compute equal patches in
    an equal order.
    """
    # By site and name of a parameter, the rectangles of every rank.
    boxes_by_name: list[dict[str, list[_RankBox]]] = [defaultdict(list) for _ in layouts]
    for site_boxes, layout in zip(boxes_by_name, layouts, strict=True):
        for holder, boxes in enumerate(layout):
            for number, box in enumerate(boxes):
                site_boxes[box.name].append(_RankBox(holder, number, box))
    # By group of ranks, patches with their sort keys.
    patches: dict[Ranks, list[tuple[tuple[str, Ranks], Patch]]] = defaultdict(list)
    for index, rectangle in enumerate(layouts[site][rank]):
        # Rectangles of every site that overlap with this rectangle.
        near = [
            [other for other in site_boxes[rectangle.name] if rectangle.intersect(other.box)]
            for site_boxes in boxes_by_name
        ]

        # Boxes that a rank of every site has, where only this rank counts for its site.
        common = [_Common(rectangle, ())]
        for position, site_near in enumerate(near):
            candidates = [_RankBox(rank, index, rectangle)] if position == site else site_near
            intersections = []
            for box, earlier_boxes in common:
                for rank_box in candidates:
                    intersection = box.intersect(rank_box.box)
                    if intersection is not None:
                        intersections.append(_Common(intersection, (*earlier_boxes, rank_box)))
            common = intersections

        # Holders of a cell exchange it in turns, a rank of every site in each turn.
        for box, rank_boxes in common:
            ranks = tuple(rank_box.rank for rank_box in rank_boxes)
            key = rectangle.name, tuple(rank_box.number for rank_box in rank_boxes)
            for cell in _split_into_cells(box, near):
                turns = range(max(map(len, cell.holders)))
                turn_ranks = (tuple(h[turn % len(h)] for h in cell.holders) for turn in turns)
                if ranks in turn_ranks:
                    patches[ranks].append((key, Patch(index, cell.box)))
    # A stable sort keeps the cells of a rectangle in the order in which all ranks find them.
    return {
        ranks: [patch for _, patch in sorted(patches[ranks], key=lambda item: item[0])]
        for ranks in sorted(patches)
    }


def _split_into_cells(box: ParameterBox, near: Sequence[Sequence[_RankBox]]) -> Sequence[_Cell]:
    """Split `box` at the boundaries of the rectangles `near`, by site."""
    cells = [_Cell(box, [() for _ in near])]
    for site, site_near in enumerate(near):
        for rank_box in site_near:
            split: list[_Cell] = []
            for cell in cells:
                inner = cell.box.intersect(rank_box.box)
                if inner is None:
                    split.append(cell)
                    continue
                holders = [*cell.holders]  # the part inside has one holder more
                holders[site] = (*holders[site], rank_box.rank)
                split.append(_Cell(inner, holders))
                split += [_Cell(outer, cell.holders) for outer in cell.box.difference(inner)]
            cells = split
    return cells
