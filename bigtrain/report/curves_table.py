"""Curves as a table of numbers, also for screen readers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from bigtrain.report.charts import CHARTS, Chart, names_of, reduced_of
from bigtrain.report.reduction import Bucketed
from bigtrain.report.run import Run

_HEADS = ("Curve", "First", "Last", "Least", "Greatest", "Mean")


def curves_html(runs: Sequence[Run]) -> str:
    """Return a row for each curve of each run: first and last value, extremes and mean."""
    rows = [
        _row(run.name if len(runs) > 1 else "", chart, name, reduced_of(chart, run).series[name])
        for chart in CHARTS
        for run in runs
        for name in names_of(chart, run)
    ]
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{head}</th>' for head in _HEADS)
    return (
        f"<details><summary>Curve values <small>{len(rows)} curves</small></summary>"
        f'<div class="scroll"><table class="numbers"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _row(run: str, chart: Chart, name: str, series: Bucketed) -> str:
    entry = _entry(chart, name).removesuffix("_seconds")
    words = [run, chart.title, entry]
    label = ": ".join(word for word in words if word) + (f", {chart.unit}" if chart.unit else "")
    known = series.mean[~np.isnan(series.mean)]
    figures = (
        known[0],
        known[-1],
        np.nanmin(series.minimum),
        np.nanmax(series.maximum),
        known.mean(),
    )
    cells = "".join(f"<td>{_figure(float(value) * chart.scale)}</td>" for value in figures)
    return f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>'


def _entry(chart: Chart, name: str) -> str:
    """Return the label of a series of `chart`, shown next to the chart's title."""
    if name not in chart.series:
        return name.partition("/")[2]
    several = sum(1 for one in chart.series if not one.endswith("*")) > 1
    return name.replace("_", " ") if several else ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"
