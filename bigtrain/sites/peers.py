"""Ranks of sites with different layouts that hold common elements. No communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bigtrain.sites.rectangles import ParameterBox

Ranks = tuple[int, ...]
"""One rank of each site, in the order of the sites."""
Layout = Sequence[Sequence[ParameterBox]]
"""The rectangles that each rank of a site exchanges, which do not overlap."""
_Owned = tuple[int, int, ParameterBox]
"""A rank, the index of one of its rectangles, and the rectangle."""


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
    owned: list[dict[str, list[_Owned]]] = [defaultdict(list) for _ in layouts]
    for by_name, layout in zip(owned, layouts, strict=True):
        for holder, boxes in enumerate(layout):
            for number, box in enumerate(boxes):
                by_name[box.name].append((holder, number, box))
    patches: dict[Ranks, list[tuple[tuple[str, Ranks], Patch]]] = defaultdict(list)
    for index, rectangle in enumerate(layouts[site][rank]):
        # Rectangles of all sites that overlap with this rectangle.
        near = [
            [
                (holder, number, neighbour)
                for holder, number, neighbour in site_boxes[rectangle.name]
                if rectangle.intersect(neighbour) is not None
            ]
            for site_boxes in owned
        ]

        # Boxes that a rank of every site has, this rank for its site.
        near_here = near[site]
        near[site] = [(rank, index, rectangle)]
        common: list[tuple[ParameterBox, tuple[tuple[int, int], ...]]] = [(rectangle, ())]
        for site_boxes in near:
            cuts = []
            for box, members in common:
                for holder, number, neighbour in site_boxes:
                    cut = box.intersect(neighbour)
                    if cut is not None:
                        cuts.append((cut, (*members, (holder, number))))
            common = cuts
        near[site] = near_here

        # Holders of a cell exchange it in turns, a rank of every site in each turn.
        for box, members in common:
            ranks = tuple(holder for holder, _ in members)
            key = rectangle.name, tuple(number for _, number in members)
            for cell, holders in _held_alike(box, near):
                turns = range(max(map(len, holders)))
                if any(
                    ranks == tuple(site_holders[n % len(site_holders)] for site_holders in holders)
                    for n in turns
                ):
                    patches[ranks].append((key, Patch(index, cell)))
    # A stable sort keeps the cells of a rectangle in the order in which all ranks find them.
    return {
        ranks: [patch for _, patch in sorted(patches[ranks], key=lambda item: item[0])]
        for ranks in sorted(patches)
    }


def _held_alike(
    box: ParameterBox, near: Sequence[Sequence[_Owned]]
) -> Iterator[tuple[ParameterBox, list[Ranks]]]:
    """Split `box` into cells without a boundary of a rectangle inside; yield each cell with the
    ranks of every site that hold it."""
    cells: list[tuple[ParameterBox, list[Ranks]]] = [(box, [() for _ in near])]
    for site, site_boxes in enumerate(near):
        for holder, _, neighbour in site_boxes:
            cut: list[tuple[ParameterBox, list[Ranks]]] = []
            for cell, holders in cells:
                inner = cell.intersect(neighbour)
                if inner is None:
                    cut.append((cell, holders))
                    continue
                inner_holders = [*holders]
                inner_holders[site] = (*inner_holders[site], holder)
                cut.append((inner, inner_holders))
                cut += [(outer_cell, holders) for outer_cell in cell.difference(inner)]
            cells = cut
    yield from cells
