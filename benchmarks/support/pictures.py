"""A picture of curves over powers, as SVG. Imports nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 40, 50
_COLOURS = (
    *("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f"),
    *("#b07aa1", "#9c755f", "#edc948", "#ff9da7", "#555555"),
)


def log_log_picture(title: str, lines: Mapping[str, Mapping[int, float]]) -> str:
    """Curves of seconds over ranks, both axes logarithmic, each named at its end."""
    ranks = sorted({number for points in lines.values() for number in points})
    values = [max(value, 1e-4) for points in lines.values() for value in points.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    first, last = math.log(ranks[0]), math.log(max(ranks[-1], ranks[0] + 1))

    def x(number: float) -> float:
        share = (math.log(number) - first) / (last - first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (math.log10(max(value, 1e-4)) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{title}</text>',
    ]
    for power in range(low, high + 1):
        place = y(10.0**power)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}" '
            'stroke="#dddddd"/>'
            f'<text x="{_LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>'
        )
    for number in ranks:
        place = x(number)
        parts.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" '
            'stroke="#eeeeee"/>'
            f'<text x="{place:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">'
            f"{number:,}</text>"
        )
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
        "ranks</text>"
    )
    ends = sorted((y(points[max(points)]), name) for name, points in lines.items())
    label = float("-inf")
    labels = {}
    for place, name in ends:
        label = max(place, label + 14)
        labels[name] = label
    for (name, points), colour in zip(lines.items(), _COLOURS * len(lines), strict=False):
        path = " ".join(f"{x(n):.1f},{y(points[n]):.1f}" for n in sorted(points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{labels[name] + 4:.1f}" fill="{colour}">'
            f"{name}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
