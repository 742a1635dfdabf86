"""Drawing of hosts and ranks as SVG, from `environment.json`.

A small world is drawn rank by rank with coordinates; with thousands of ranks one replica of the
model is drawn, with the number of replicas and the hosts as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.report.templates import section
from bigtrain.settings.degrees import AXES

_MOST_RANKS = 64
"""Maximum number of ranks drawn one by one; also for one replica."""
_CELL = (74, 44)
"""Width and height of a rank; `sections.html` draws it."""
_GAP = 6
_COLUMNS = 4


@dataclass(frozen=True)
class RecordedLayout:
    """World size and parallel degrees, recorded by a run.

    sizes: size of each axis; order: the axes from outermost to innermost, which defines the order
    of ranks; hosts: ranks by host, empty if they were not recorded.
    """

    world_size: int
    sizes: Mapping[str, int]
    order: Sequence[str]
    hosts: Mapping[str, Sequence[int]]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` on each axis."""
        coordinates = {}
        for axis in reversed(self.order):
            rank, coordinates[axis] = divmod(rank, self.sizes[axis])
        return coordinates

    @property
    def axes(self) -> list[str]:
        """Axes of size above 1, in order."""
        return [axis for axis in self.order if self.sizes[axis] > 1]


def layout_of(environment: Mapping[str, Any] | None) -> RecordedLayout | None:
    """Return the layout in `environment.json`; None if it is missing or inconsistent."""
    topology = (environment or {}).get("topology")
    if not isinstance(topology, dict):
        return None
    sizes: dict[str, Any] = {axis: topology.get(f"{axis}_size", 1) for axis in AXES}
    world_size = topology.get("world_size")
    product = 1
    for size in sizes.values():
        if type(size) is not int or size < 1:
            return None
        product *= size
    if product != world_size:
        return None
    assert environment is not None
    order = environment.get("rank_order")
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(AXES):
        order = list(AXES)
    # Hosts, if together they have every rank once.
    value = environment.get("hosts")
    entries = value.items() if isinstance(value, dict) else ()
    hosts = {str(name): ranks for name, ranks in entries if isinstance(ranks, list)}
    everyone = [rank for ranks in hosts.values() for rank in ranks]
    all_integers = all(type(rank) is int for rank in everyone)
    if not all_integers or sorted(everyone) != list(range(product)):
        hosts = {}
    return RecordedLayout(product, sizes, order, hosts)


def topology_html(environment: Mapping[str, Any] | None) -> str:
    """Return a sentence and the drawing."""
    layout = layout_of(environment)
    values: dict[str, Any] = {"axes": [], "drawings": [], "large": None, "hosts": None}
    if layout is None:
        sentence = "environment.json does not record the ranks."
        return section("topology", sentence=sentence, **values)
    values["axes"] = layout.axes
    if layout.world_size <= _MOST_RANKS:
        hosts = layout.hosts or {"": range(layout.world_size)}
        values["drawings"] = [_drawing(layout, name, ranks) for name, ranks in hosts.items()]
        return section("topology", sentence=_sentence(layout), **values)
    replica = [r for r in range(layout.world_size) if layout.coordinates(r)["data"] == 0]
    copies = layout.sizes["data"]
    if 1 < len(replica) <= _MOST_RANKS:
        title = f"one of {copies:,} replicas" if copies > 1 else "the model"
        values["drawings"] = [_drawing(layout, title, replica)]
    elif len(replica) > _MOST_RANKS:
        values["large"] = len(replica), _degrees(layout, omitted_axis="data")
    values["hosts"] = [(name, _spans(ranks)) for name, ranks in layout.hosts.items()]
    return section("topology", sentence=_sentence(layout), **values)


def _sentence(layout: RecordedLayout) -> str:
    if layout.world_size == 1:
        return "One rank."
    text = f"{layout.world_size:,} ranks = {_degrees(layout)}"
    if layout.hosts:
        rank_counts = sorted({len(ranks) for ranks in layout.hosts.values()})
        fewest, most_ranks = rank_counts[0], rank_counts[-1]
        per_host = f"{fewest:,}" if len(rank_counts) == 1 else f"{fewest:,} to {most_ranks:,}"
        if len(layout.hosts) == 1:
            text += f", on 1 host with {per_host} ranks"
        else:
            noun = "rank" if rank_counts == [1] else "ranks"
            text += f", on {len(layout.hosts):,} hosts with {per_host} {noun} each"
    return text + "."


def _degrees(layout: RecordedLayout, omitted_axis: str = "") -> str:
    axes = [axis for axis in layout.axes if axis != omitted_axis] or ["data"]
    return " x ".join(f"{layout.sizes[axis]:,} {axis}-parallel" for axis in axes)


def _drawing(layout: RecordedLayout, title: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Return one host, or one replica: a cell for each rank, coloured by pipeline stage."""
    # Tensor-parallel peers are in one row, if they fit a phone's screen.
    innermost = layout.sizes[layout.order[-1]]
    columns = min(len(ranks), innermost if 1 < innermost <= _COLUMNS else _COLUMNS)
    rows = -(-len(ranks) // columns)
    top = 26 if title else 6
    width = columns * (_CELL[0] + _GAP) + _GAP
    cells = []
    for number, rank in enumerate(ranks):
        row, column = divmod(number, columns)
        coordinates = layout.coordinates(rank)
        cells.append(
            {
                "rank": rank,
                "x": _GAP + column * (_CELL[0] + _GAP),
                "y": top + row * (_CELL[1] + _GAP),
                "stage": coordinates["pipeline"] % 8,
                "words": ", ".join(f"{axis} {coordinates[axis]}" for axis in layout.axes),
                "short": " ".join(f"{axis[0]}{coordinates[axis]}" for axis in layout.axes),
            }
        )
    return {
        "title": title if len(title) <= width // 8 else f"{title[: width // 8 - 1]}…",
        "label": f"{title or 'the run'}: ranks {ranks[0]} to {ranks[-1]}",
        "width": width,
        "height": top + rows * (_CELL[1] + _GAP),
        "cells": cells,
    }


def _spans(ranks: Sequence[int]) -> str:
    """Return ranks in words: 0 to 7, 16."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in spans)
