"""Ranks of sites with different layouts that hold the same elements. No communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    """A rectangle that the same ranks exchange, inside rectangle `index` of this rank's layout."""

    index: int
    box: ParameterBox


def overlapping_peers(layouts: Sequence[Layout], site: int, rank: int) -> dict[Ranks, list[Patch]]:
    """Return what `rank` of `site` exchanges, by the ranks that exchange it together, ascending.

    A rectangle that every site holds once is exchanged once. Where a site holds it several times
    (norms of tensor-parallel ranks, tied embeddings), each of these ranks takes part once, with one
    rank of every other site, in turn if that site has fewer. All ranks of a group compute the same
    patches in the same order.
    """
    owned = [_by_name(layout) for layout in layouts]
    patches: dict[Ranks, list[tuple[tuple[str, Ranks], Patch]]] = defaultdict(list)
    for index, own in enumerate(layouts[site][rank]):
        near = [
            [one for one in of_site[own.name] if own.intersect(one[2]) is not None]
            for of_site in owned
        ]
        near_here = near[site]
        near[site] = [(rank, index, own)]
        common: list[tuple[ParameterBox, tuple[tuple[int, int], ...]]] = [(own, ())]
        for of_site in near:
            common = [
                (cut, (*members, (holder, number)))
                for box, members in common
                for holder, number, other in of_site
                if (cut := box.intersect(other)) is not None
            ]
        near[site] = near_here
        for box, members in common:
            ranks = tuple(holder for holder, _ in members)
            key = own.name, tuple(number for _, number in members)
            for cell, holders in _held_alike(box, near):
                if _are_paired(ranks, holders):
                    patches[ranks].append((key, Patch(index, cell)))
    # A stable sort keeps the cells of one rectangle in the order in which all ranks find them.
    return {
        ranks: [patch for _, patch in sorted(patches[ranks], key=lambda item: item[0])]
        for ranks in sorted(patches)
    }


def _by_name(layout: Layout) -> Mapping[str, list[_Owned]]:
    """Return the rectangles by parameter, in the order of the ranks."""
    by_name: dict[str, list[_Owned]] = defaultdict(list)
    for rank, boxes in enumerate(layout):
        for index, box in enumerate(boxes):
            by_name[box.name].append((rank, index, box))
    return by_name


def _held_alike(
    box: ParameterBox, near: Sequence[Sequence[_Owned]]
) -> Iterator[tuple[ParameterBox, list[Ranks]]]:
    """Split `box` into pieces that the same ranks of every site hold; yield these ranks too."""
    cells: list[tuple[ParameterBox, list[Ranks]]] = [(box, [() for _ in near])]
    for site, of_site in enumerate(near):
        for holder, _, other in of_site:
            cut: list[tuple[ParameterBox, list[Ranks]]] = []
            for cell, holders in cells:
                inner = cell.intersect(other)
                if inner is None:
                    cut.append((cell, holders))
                    continue
                more = [*holders]
                more[site] = (*more[site], holder)
                cut.append((inner, more))
                cut += [(rest, holders) for rest in cell.difference(inner)]
            cells = cut
    yield from cells


def _are_paired(ranks: Ranks, holders: Sequence[Ranks]) -> bool:
    """Return whether `ranks`, one holder of each site, exchange together."""
    rounds = range(max(map(len, holders)))
    turns = zip(*([of_site[n % len(of_site)] for n in rounds] for of_site in holders), strict=True)
    return ranks in turns
