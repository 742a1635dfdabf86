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

_MAX_DRAWN_RANKS = 64
"""Maximum number of ranks, of the world or of one replica, that are drawn one by one."""
_CELL_WIDTH, _CELL_HEIGHT = 74, 44
"""Pixels of a rank's cell, as in `sections.html`, which draws it."""
_CELL_GAP = 6
_MAX_COLUMNS = 4


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
    recorded_hosts = environment.get("hosts")
    recorded_hosts = recorded_hosts if isinstance(recorded_hosts, dict) else {}
    hosts = {str(name): ranks for name, ranks in recorded_hosts.items() if isinstance(ranks, list)}
    all_ranks = [rank for ranks in hosts.values() for rank in ranks]
    are_integers = all(type(rank) is int for rank in all_ranks)
    if not are_integers or sorted(all_ranks) != list(range(product)):
        hosts = {}
    return RecordedLayout(product, sizes, order, hosts)


def topology_html(environment: Mapping[str, Any] | None) -> str:
    """Return the HTML of a sentence on the topology, and of drawings of hosts or of a replica."""
    layout = layout_of(environment)
    values: dict[str, Any] = {"axes": [], "drawings": [], "large": None, "hosts": None}
    if layout is None:
        sentence = "environment.json does not record the ranks."
        return section("topology", sentence=sentence, **values)
    values["axes"] = layout.axes
    if layout.world_size <= _MAX_DRAWN_RANKS:
        hosts = layout.hosts or {"": range(layout.world_size)}
        values["drawings"] = [_drawing(layout, name, ranks) for name, ranks in hosts.items()]
        return section("topology", sentence=_topology_sentence(layout), **values)
    # Of a large world only the first replica is drawn.
    all_ranks = range(layout.world_size)
    replica_ranks = [rank for rank in all_ranks if layout.coordinates(rank)["data"] == 0]
    num_replicas = layout.sizes["data"]
    if 1 < len(replica_ranks) <= _MAX_DRAWN_RANKS:
        title = f"one of {num_replicas:,} replicas" if num_replicas > 1 else "the model"
        values["drawings"] = [_drawing(layout, title, replica_ranks)]
    elif len(replica_ranks) > _MAX_DRAWN_RANKS:
        values["large"] = len(replica_ranks), _degrees_text(layout, omitted_axis="data")
    values["hosts"] = [(name, _rank_spans(ranks)) for name, ranks in layout.hosts.items()]
    return section("topology", sentence=_topology_sentence(layout), **values)


def _topology_sentence(layout: RecordedLayout) -> str:
    """Return the number of ranks, the degrees and the hosts as a sentence."""
    if layout.world_size == 1:
        return "One rank."
    text = f"{layout.world_size:,} ranks = {_degrees_text(layout)}"
    if layout.hosts:
        rank_counts = sorted({len(ranks) for ranks in layout.hosts.values()})
        count_text = f"{rank_counts[0]:,}"
        if len(rank_counts) > 1:
            count_text += f" to {rank_counts[-1]:,}"
        if len(layout.hosts) == 1:
            text += f", on 1 host with {count_text} ranks"
        else:
            noun = "rank" if rank_counts == [1] else "ranks"
            text += f", on {len(layout.hosts):,} hosts with {count_text} {noun} each"
    return text + "."


def _degrees_text(layout: RecordedLayout, omitted_axis: str = "") -> str:
    axes = [axis for axis in layout.axes if axis != omitted_axis] or ["data"]
    return " x ".join(f"{layout.sizes[axis]:,} {axis}-parallel" for axis in axes)


def _drawing(layout: RecordedLayout, title: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the drawing of a host's or replica's ranks: pixels, and a cell for each rank, coloured
    by pipeline stage."""
    # Peers on the innermost axis (tensor) share a row, if a phone's screen is wide enough.
    innermost_size = layout.sizes[layout.order[-1]]
    is_one_row = 1 < innermost_size <= _MAX_COLUMNS
    num_columns = min(len(ranks), innermost_size if is_one_row else _MAX_COLUMNS)
    num_rows = -(-len(ranks) // num_columns)
    top = 26 if title else 6
    width = num_columns * (_CELL_WIDTH + _CELL_GAP) + _CELL_GAP
    cells = []
    for number, rank in enumerate(ranks):
        row, column = divmod(number, num_columns)
        coordinates = layout.coordinates(rank)
        cells.append(
            {
                "rank": rank,
                "x": _CELL_GAP + column * (_CELL_WIDTH + _CELL_GAP),
                "y": top + row * (_CELL_HEIGHT + _CELL_GAP),
                "stage": coordinates["pipeline"] % 8,
                "words": ", ".join(f"{axis} {coordinates[axis]}" for axis in layout.axes),
                "short": " ".join(f"{axis[0]}{coordinates[axis]}" for axis in layout.axes),
            }
        )
    max_characters = width // 8  # about 8 pixels each
    return {
        "title": title if len(title) <= max_characters else f"{title[: max_characters - 1]}…",
        "label": f"{title or 'the run'}: ranks {ranks[0]} to {ranks[-1]}",
        "width": width,
        "height": top + num_rows * (_CELL_HEIGHT + _CELL_GAP),
        "cells": cells,
    }


def _rank_spans(ranks: Sequence[int]) -> str:
    """Return ranks in words: 0 to 7, 16."""
    spans: list[list[int]] = []  # first and last rank
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(
        f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in spans
    )
