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


class _Held(NamedTuple):
    """Rectangle `number` in the layout of a site's `rank`."""

    rank: int
    number: int
    box: ParameterBox


class _Common(NamedTuple):
    """A box inside rectangles of several sites, `held` of each site."""

    box: ParameterBox
    held: tuple[_Held, ...]


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
    held_by_name: list[dict[str, list[_Held]]] = [defaultdict(list) for _ in layouts]
    for site_held, layout in zip(held_by_name, layouts, strict=True):
        for holder, boxes in enumerate(layout):
            for number, box in enumerate(boxes):
                site_held[box.name].append(_Held(holder, number, box))
    # By group of ranks, patches with their sort keys.
    patches: dict[Ranks, list[tuple[tuple[str, Ranks], Patch]]] = defaultdict(list)
    for index, rectangle in enumerate(layouts[site][rank]):
        # Rectangles of every site that overlap with this rectangle.
        near = [
            [
                held
                for held in site_held[rectangle.name]
                if rectangle.intersect(held.box) is not None
            ]
            for site_held in held_by_name
        ]

        # Boxes that a rank of every site has, where only this rank counts for its site.
        common = [_Common(rectangle, ())]
        for position, site_near in enumerate(near):
            candidates = [_Held(rank, index, rectangle)] if position == site else site_near
            intersections = []
            for box, held_before in common:
                for held in candidates:
                    intersection = box.intersect(held.box)
                    if intersection is not None:
                        intersections.append(_Common(intersection, (*held_before, held)))
            common = intersections

        # Holders of a cell exchange it in turns, a rank of every site in each turn.
        for box, held_by_site in common:
            ranks = tuple(held.rank for held in held_by_site)
            key = rectangle.name, tuple(held.number for held in held_by_site)
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


def _split_into_cells(box: ParameterBox, near: Sequence[Sequence[_Held]]) -> Sequence[_Cell]:
    """Split `box` at the boundaries of the rectangles `near`, by site."""
    cells = [_Cell(box, [() for _ in near])]
    for site, site_near in enumerate(near):
        for held in site_near:
            split: list[_Cell] = []
            for cell in cells:
                inside = cell.box.intersect(held.box)
                if inside is None:
                    split.append(cell)
                    continue
                holders = [*cell.holders]
                holders[site] = (*holders[site], held.rank)
                split.append(_Cell(inside, holders))
                split += [_Cell(outside, cell.holders) for outside in cell.box.difference(inside)]
            cells = split
    return cells
