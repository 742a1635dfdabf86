"""Charts of the page, and their data in the format that the browser reads; the same curves as a
table, also for screen readers.

Columns are base64 of little-endian numbers, which a browser decodes into typed arrays: a million
logged steps are a few megabytes. Values are float32, steps float64.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bigtrain.metrics.step_metrics import StepMetrics, is_optional
from bigtrain.report.marks import Marks
from bigtrain.report.metrics_file import TABLES
from bigtrain.report.reduction import Bucketed, Column, Reduced
from bigtrain.report.run_files import Run

_MAX_KNOTS = 2048


@dataclass(frozen=True)
class Chart:
    """Definition of a chart.

    table: one of `TABLES`; series: names there, or ``OBJECT/*`` for all entries of an object, if
    there are at most `most_entries`. predicted: field of the prediction to draw as well. stacked:
    as stacked areas, per run; overlaid: series that are shares of the stacked ones, drawn as lines
    over the areas. scale: factor for the file's values. only_some_runs: a run without the chart is
    not reported, since the chart needs experts, sites, or the like. from_zero: the axis begins at
    zero.
    """

    name: str
    title: str
    unit: str
    about: str
    table: str
    series: tuple[str, ...]
    predicted: str | None = None
    logarithmic: bool = False
    stacked: bool = False
    scale: int = 1
    overlaid: tuple[str, ...] = ()
    only_some_runs: bool = False
    most_entries: int = 64
    from_zero: bool = False


# Charts that draw several series, or one series in a special way.
_SPECIAL_CHARTS = tuple(
    Chart(**{**row, "series": tuple(row["series"]), "overlaid": tuple(row.get("overlaid", ()))})
    for row in json.loads(Path(__file__).with_name("charts.json").read_text(encoding="utf-8"))
)


def own_charts(metrics: type = StepMetrics) -> Iterator[Chart]:
    """Yield a chart for each metric of a step that no special chart draws."""
    drawn_metrics = {
        name.removesuffix("/*").partition("/")[0]
        for chart in _SPECIAL_CHARTS
        for name in chart.series
    }
    for row in fields(metrics):
        metric_kind, name = row.metadata["kind"], row.name
        if metric_kind == "position" or name in drawn_metrics:
            continue
        yield Chart(
            name.replace("_", "-"),
            name.replace("_", " ").capitalize(),
            row.metadata.get("unit", ""),
            f"{row.metadata['meaning'].capitalize()}.",
            "steps",
            (f"{name}/*",) if metric_kind == "entries" else (name,),
            only_some_runs=is_optional(row),
        )


CHARTS = (*_SPECIAL_CHARTS, *own_charts())


def names_of(chart: Chart, run: Run) -> list[str]:
    """Return the series of `chart` for which `run` has values, overlaid series last."""
    reduced = run.metrics.table(chart.table).reduced()
    available = [
        name for name, bucketed in reduced.series.items() if not np.isnan(bucketed.mean).all()
    ]
    names = []
    for pattern in chart.series:
        if pattern.endswith("*"):
            entries = [name for name in available if name.startswith(pattern[:-1])]
            if len(entries) <= chart.most_entries:
                names += entries
        elif pattern in available:
            names.append(pattern)
    return sorted(names, key=lambda name: name in chart.overlaid)


def page_data(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> dict[str, Any]:
    """Return the data of the page: charts, and curves and marks of every run."""
    return {
        "tables": TABLES,
        "charts": charts_data(runs),
        "runs": [run_data(run, run_marks) for run, run_marks in zip(runs, marks, strict=True)],
    }


def charts_data(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the charts, each with the series that each run has."""
    return [
        {
            "name": chart.name,
            "title": chart.title,
            "unit": chart.unit,
            "table": chart.table,
            "predicted": chart.predicted,
            "logarithmic": chart.logarithmic,
            "stacked": chart.stacked,
            "apart": chart.overlaid,
            "scale": chart.scale,
            "fromZero": chart.from_zero,
            # Series that are not entries of an object. The browser labels a single one by the
            # chart's title, and several by their names.
            "named": [name for name in chart.series if not name.endswith("*")],
            "series": [names_of(chart, run) for run in runs],
        }
        for chart in CHARTS
    ]


def run_data(
    run: Run, marks: Sequence[Marks], since: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the curves and marks of a run; `since`: by table, the first bucket to return."""
    # Curves, by table; then marks and predicted values.
    tables = {}
    for name in TABLES:
        first_bucket, table = (since or {}).get(name, 0), run.metrics.table(name)
        buckets = _encoded_buckets(table.reduced(first_bucket), first_bucket)
        tables[name] = {**buckets, "complete": table.num_complete}
    prediction = run.files.prediction
    return {
        "name": run.name,
        "version": run.metrics.version,
        **tables,
        "knots": _encoded_knots(run.metrics.steps.reduced()),
        "marks": [
            {
                "kind": events.event_kind,
                "steps": events.steps,
                "counts": events.counts,
                "total": events.total,
                "texts": [[step, text] for step, text in events.rows if step is not None],
            }
            for events in marks
        ],
        "predicted": {
            name: getattr(prediction, name)
            for name in ("step_seconds", "tokens_per_second", "peak_memory_gib")
            if prediction is not None
        },
    }


def _encoded_buckets(reduced: Reduced, since: int) -> dict[str, Any]:
    """Return buckets for the browser. Buckets of a single row have no minimum and maximum, which
    equal the mean."""
    series: dict[str, dict[str, str]] = {}
    for name, bucketed in reduced.series.items():
        if since == 0 and np.isnan(bucketed.mean).all():
            continue
        series[name] = {"mean": _base64(bucketed.mean, "<f4")}
        if reduced.width > 1:
            series[name]["low"] = _base64(bucketed.minimum, "<f4")
            series[name]["high"] = _base64(bucketed.maximum, "<f4")
    return {
        "width": reduced.width,
        "since": since,
        "rows": reduced.num_rows,
        "step": _base64(reduced.last["step"], "<f8"),
        "series": series,
    }


def _encoded_knots(reduced: Reduced) -> dict[str, dict[str, str]]:
    """Return tokens, samples and hours by step as knots of a piecewise linear curve: the ends and
    the points where the slope changes; if these are too many, some of them, evenly spaced."""
    steps = reduced.last["step"]
    encoded_knots = {}
    for name in ("tokens", "samples", "hours"):
        values = reduced.last[name]
        knots = np.arange(len(steps))
        if len(steps) >= 3:
            slopes = np.diff(values) / np.diff(steps)
            bends = ~np.isclose(slopes[1:], slopes[:-1], rtol=1e-9, atol=0.0)
            knots = np.flatnonzero(np.concatenate([[True], bends, [True]]))
        if len(knots) > _MAX_KNOTS:
            kept_indices = np.linspace(0, len(knots) - 1, _MAX_KNOTS).round().astype(int)
            knots = knots[np.unique(kept_indices)]
        encoded_knots[name] = {
            "step": _base64(steps[knots], "<f8"),
            "value": _base64(values[knots], "<f8"),
        }
    return encoded_knots


def _base64(column: Column, number_format: str) -> str:
    """Return a column as base64 of numbers in a format of numpy, such as "<f4"."""
    with np.errstate(over="ignore"):  # a value may be too large for float32
        return base64.b64encode(column.astype(number_format).tobytes()).decode("ascii")


def mean_of(run: Run, prefix: str) -> Mapping[str, float]:
    """Return the mean over the run of every series of an object, by entry."""
    return _statistic_by_entry(run, prefix, lambda bucketed: float(np.nanmean(bucketed.mean)))


def peak_of(run: Run, prefix: str) -> Mapping[str, float]:
    """Return the largest value of every series of an object, by entry."""
    return _statistic_by_entry(run, prefix, lambda bucketed: float(np.nanmax(bucketed.maximum)))


def _statistic_by_entry(
    run: Run, prefix: str, statistic: Callable[[Bucketed], float]
) -> dict[str, float]:
    """Return a statistic of every series ``prefix/ENTRY`` with values, by entry."""
    series = run.metrics.steps.reduced().series
    return {
        name.partition("/")[2]: statistic(bucketed)
        for name, bucketed in series.items()
        if name.startswith(f"{prefix}/") and not np.isnan(bucketed.mean).all()
    }


def curve_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return a row for every curve of the runs: its label, and the texts of first and last value,
    minimum, maximum and mean."""
    rows = []
    for chart in CHARTS:
        has_named_series = sum(not series_name.endswith("*") for series_name in chart.series) > 1
        for run in runs:
            table = run.metrics.table(chart.table).reduced()
            for name in names_of(chart, run):
                # Run, chart and series, without those that need no name, as a chart's only series.
                if name not in chart.series:
                    entry = name.partition("/")[2]
                else:
                    entry = name.replace("_", " ") if has_named_series else ""
                run_name = run.name if len(runs) > 1 else ""
                words = [run_name, chart.title, entry.removesuffix("_seconds")]
                label = ": ".join(word for word in words if word)
                label += f", {chart.unit}" if chart.unit else ""

                bucketed = table.series[name]
                values = bucketed.mean[~np.isnan(bucketed.mean)]
                extremes = np.nanmin(bucketed.minimum), np.nanmax(bucketed.maximum)
                texts = []
                for value in (values[0], values[-1], *extremes, values.mean()):
                    number = float(value) * chart.scale
                    is_long = 1e5 <= abs(number) < 1e15
                    texts.append(f"{number:,.0f}" if is_long else f"{number:.5g}")
                rows.append((label, texts))
    return rows
