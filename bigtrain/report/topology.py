"""Drawing of hosts and ranks as SVG, from `environment.json`.

A small world is drawn rank by rank with coordinates; with thousands of ranks one replica of the
model is drawn, with the number of replicas and the hosts as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_MOST_RANKS = 64
"""Maximum number of ranks drawn one by one; also for one replica."""
_AXES = ("data", "pipeline", "sequence", "tensor")
_CELL = (74, 44)
_GAP = 6
_COLUMNS = 4


@dataclass(frozen=True)
class Layout:
    """World size and parallel degrees as recorded by a run.

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


def layout_of(environment: Mapping[str, Any] | None) -> Layout | None:
    """Return the layout in `environment.json`; None if it is missing or inconsistent."""
    topology = (environment or {}).get("topology")
    if not isinstance(topology, dict):
        return None
    sizes = {axis: topology.get(f"{axis}_size", 1) for axis in _AXES}
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
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(_AXES):
        order = list(_AXES)
    return Layout(product, sizes, order, _hosts(environment.get("hosts"), product))


def _hosts(value: Any, world_size: int) -> dict[str, list[int]]:
    if not isinstance(value, dict):
        return {}
    hosts = {str(name): ranks for name, ranks in value.items() if isinstance(ranks, list)}
    everyone = [rank for ranks in hosts.values() for rank in ranks]
    whole = all(type(rank) is int for rank in everyone)
    return hosts if whole and sorted(everyone) == list(range(world_size)) else {}


def topology_html(environment: Mapping[str, Any] | None) -> str:
    """Return a sentence and the drawing."""
    layout = layout_of(environment)
    if layout is None:
        return "<p>environment.json does not record the ranks.</p>"
    parts = [f"<p>{escape(_sentence(layout))}</p>"]
    if layout.world_size <= _MOST_RANKS:
        hosts = layout.hosts or {"": range(layout.world_size)}
        parts.append(
            _drawings(layout, [_drawing(layout, name, ranks) for name, ranks in hosts.items()])
        )
        return "".join(parts)
    replica = [r for r in range(layout.world_size) if layout.coordinates(r)["data"] == 0]
    copies = layout.sizes["data"]
    if 1 < len(replica) <= _MOST_RANKS:
        title = f"one of {copies:,} replicas" if copies > 1 else "the model"
        parts.append(_drawings(layout, [_drawing(layout, title, replica)]))
    elif len(replica) > _MOST_RANKS:
        parts.append(
            f"<p>A replica is {len(replica):,} ranks, too many to draw one by one: "
            f"{escape(_degrees(layout, without='data'))}.</p>"
        )
    parts.append(_hosts_html(layout))
    return "".join(parts)


def _sentence(layout: Layout) -> str:
    if layout.world_size == 1:
        return "One rank."
    text = f"{layout.world_size:,} ranks = {_degrees(layout)}"
    if layout.hosts:
        each = sorted({len(ranks) for ranks in layout.hosts.values()})
        many = f"{each[0]:,}" if len(each) == 1 else f"{each[0]:,} to {each[-1]:,}"
        one = len(layout.hosts) == 1
        text += f", on {len(layout.hosts):,} host{'' if one else 's'} with {many}"
        text += " rank each" if each == [1] and not one else " ranks" if one else " ranks each"
    return text + "."


def _degrees(layout: Layout, without: str = "") -> str:
    axes = [axis for axis in layout.axes if axis != without] or ["data"]
    return " x ".join(f"{layout.sizes[axis]:,} {axis}-parallel" for axis in axes)


def _drawings(layout: Layout, drawings: list[str]) -> str:
    axes = ", ".join(f"{axis[0]} {axis}" for axis in layout.axes)
    colour = "; the colour is the pipeline stage" if "pipeline" in layout.axes else ""
    legend = f'<p class="about">Each cell shows the rank and its coordinates ({axes}){colour}.</p>'
    legend = legend if axes else ""
    return f'{legend}<div class="topology">{"".join(drawings)}</div>'


def _drawing(layout: Layout, title: str, ranks: Sequence[int]) -> str:
    """Draw one host, or one replica: a cell for each rank, coloured by pipeline stage."""
    columns = min(len(ranks), _columns(layout))
    rows = -(-len(ranks) // columns)
    top = 26 if title else 6
    width = columns * (_CELL[0] + _GAP) + _GAP
    height = top + rows * (_CELL[1] + _GAP)
    label = f"{title or 'the run'}: ranks {ranks[0]} to {ranks[-1]}"
    parts = [
        f'<svg viewBox="0 0 {width} {height}" style="width:{width}px" role="img" '
        f'aria-label="{escape(label)}"><rect class="host" x="0.5" y="0.5" width="{width - 1}" '
        f'height="{height - 1}" rx="6"/>'
    ]
    if title:
        shown = title if len(title) <= width // 8 else f"{title[: width // 8 - 1]}…"
        parts.append(f'<text class="name" x="{_GAP + 2}" y="18">{escape(shown)}</text>')
    for number, rank in enumerate(ranks):
        row, column = divmod(number, columns)
        x = _GAP + column * (_CELL[0] + _GAP)
        y = top + row * (_CELL[1] + _GAP)
        coordinates = layout.coordinates(rank)
        stage = coordinates["pipeline"] % 8
        words = ", ".join(f"{axis} {coordinates[axis]}" for axis in layout.axes)
        short = " ".join(f"{axis[0]}{coordinates[axis]}" for axis in layout.axes)
        parts.append(
            f"<g><title>rank {rank}{': ' if words else ''}{escape(words)}</title>"
            f'<rect class="rank stage-{stage}" x="{x}" y="{y}" width="{_CELL[0]}" '
            f'height="{_CELL[1]}" rx="4"/>'
            f'<text class="number" x="{x + _CELL[0] / 2}" y="{y + 18}">{rank}</text>'
            f'<text class="place" x="{x + _CELL[0] / 2}" y="{y + 34}">{escape(short)}</text></g>'
        )
    return "".join([*parts, "</svg>"])


def _columns(layout: Layout) -> int:
    """Return the number of columns: tensor-parallel peers in a row, if they fit a phone's
    screen."""
    innermost = layout.sizes[layout.order[-1]]
    return innermost if 1 < innermost <= _COLUMNS else _COLUMNS


def _hosts_html(layout: Layout) -> str:
    if not layout.hosts:
        return "<p>The hosts of the ranks were not recorded.</p>"
    rows = [
        f"<tr><td>{escape(name)}</td><td>{_spans(ranks)}</td></tr>"
        for name, ranks in layout.hosts.items()
    ]
    return (
        f"<details><summary>{len(rows):,} hosts and their ranks</summary>"
        '<div class="scroll"><table><thead><tr><th scope="col">Host</th><th scope="col">Ranks</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _spans(ranks: Sequence[int]) -> str:
    """Return ranks in words: 0 to 7, 16."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in spans)
