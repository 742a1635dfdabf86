"""Charts of the page, and their data in the format that the browser reads.

Columns are base64 of little-endian numbers, which a browser decodes into typed arrays: a million
logged steps are a few megabytes. Values are float32, steps float64.

The table of curve values is also for screen readers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigtrain.report.marks import Marks
from bigtrain.report.metrics_file import TABLES
from bigtrain.report.reduction import Bucketed, Column, Reduced
from bigtrain.report.run_files import Run
from bigtrain.report.step_metrics import StepMetrics, is_optional

_MOST_KNOTS = 2048


@dataclass(frozen=True)
class Chart:
    """Definition of one chart.

    table: one of `TABLES`; series: names there, or ``OBJECT/*`` for all entries of an object, if
    there are at most `most_entries`. predicted: field of the prediction to draw as well. stacked:
    as stacked areas, per run; apart: series that are contained in the others, drawn as lines over
    them. scale: factor on the file's values. of_some: not reported as missing, since only some runs
    have it (a mixture of experts, several sites). from_zero: the axis begins at zero.
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
    apart: tuple[str, ...] = ()
    of_some: bool = False
    most_entries: int = 64
    from_zero: bool = False


def _special_charts() -> tuple[Chart, ...]:
    """Return the charts of charts.json, which draw several series or one in a way of its own."""
    text = Path(__file__).with_name("charts.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    for row in rows:
        row.update(series=tuple(row["series"]), apart=tuple(row.get("apart", ())))
    return tuple(Chart(**row) for row in rows)


_SPECIAL_CHARTS = _special_charts()


def own_charts(metrics: type = StepMetrics) -> Iterator[Chart]:
    """Yield a chart for each metric of a step that no special chart draws."""
    drawn = {
        name.removesuffix("/*").partition("/")[0] for c in _SPECIAL_CHARTS for name in c.series
    }
    for row in fields(metrics):
        kind, name = row.metadata["kind"], row.name
        if kind == "position" or name in drawn:
            continue
        yield Chart(
            name.replace("_", "-"),
            name.replace("_", " ").capitalize(),
            row.metadata.get("unit", ""),
            f"{row.metadata['meaning'].capitalize()}.",
            "steps",
            (f"{name}/*",) if kind == "entries" else (name,),
            of_some=is_optional(row),
        )


CHARTS = (*_SPECIAL_CHARTS, *own_charts())


def names_of(chart: Chart, run: Run) -> list[str]:
    """Return the series of `chart` for which `run` has values."""
    reduced = reduced_of(chart, run)
    known = [name for name, one in reduced.series.items() if not np.isnan(one.mean).all()]
    names = []
    for wanted in chart.series:
        if wanted.endswith("*"):
            entries = [name for name in known if name.startswith(wanted[:-1])]
            names += entries if len(entries) <= chart.most_entries else []
        elif wanted in known:
            names.append(wanted)
    return sorted(names, key=lambda name: name in chart.apart)


def reduced_of(chart: Chart, run: Run) -> Reduced:
    """Return the table of `run` that `chart` draws from."""
    return run.metrics.table(chart.table).reduced()


def page_data(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> dict[str, Any]:
    """Return the data of all charts."""
    return {
        "tables": TABLES,
        "charts": charts_data(runs),
        "runs": [run_data(run, one) for run, one in zip(runs, marks, strict=True)],
    }


def charts_data(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the charts, and the series of them that each run has."""
    return [
        {
            "name": chart.name,
            "title": chart.title,
            "unit": chart.unit,
            "table": chart.table,
            "predicted": chart.predicted,
            "logarithmic": chart.logarithmic,
            "stacked": chart.stacked,
            "apart": chart.apart,
            "scale": chart.scale,
            "fromZero": chart.from_zero,
            # Series that are not entries of an object: labelled by the chart's title, or their own.
            "named": [name for name in chart.series if not name.endswith("*")],
            "series": [names_of(chart, run) for run in runs],
        }
        for chart in CHARTS
    ]


def run_data(
    run: Run, marks: Sequence[Marks], since: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the curves and marks of one run; `since`: by table, the first bucket to return."""
    prediction, begin = run.files.prediction, since or {}
    tables = {
        name: {
            **_columns(run.metrics.table(name).reduced(begin.get(name, 0)), begin.get(name, 0)),
            "complete": run.metrics.table(name).num_complete,
        }
        for name in TABLES
    }
    return {
        "name": run.name,
        "version": run.metrics.version,
        **tables,
        "knots": _knots(run.metrics.steps.reduced()),
        "marks": [
            {
                "kind": one.kind,
                "steps": one.steps,
                "counts": one.counts,
                "total": one.total,
                "texts": [[step, text] for step, text in one.rows if step is not None],
            }
            for one in marks
        ],
        "predicted": {
            name: getattr(prediction, name)
            for name in ("step_seconds", "tokens_per_second", "peak_memory_gib")
            if prediction is not None
        },
    }


def _columns(reduced: Reduced, since: int) -> dict[str, Any]:
    """Return buckets for the browser: minimum and maximum only where they differ from the mean."""
    series: dict[str, dict[str, str]] = {}
    for name, one in reduced.series.items():
        if since == 0 and np.isnan(one.mean).all():
            continue
        series[name] = {"mean": _float32(one.mean)}
        if reduced.width > 1:
            series[name].update(low=_float32(one.minimum), high=_float32(one.maximum))
    return {
        "width": reduced.width,
        "since": since,
        "rows": reduced.num_rows,
        "step": _float64(reduced.last["step"]),
        "series": series,
    }


def _knots(reduced: Reduced) -> dict[str, dict[str, str]]:
    """Return tokens, samples and hours by step, as the knots of a piecewise linear curve."""
    step = reduced.last["step"]
    return {
        name: {"step": _float64(step[kept]), "value": _float64(reduced.last[name][kept])}
        for name in ("tokens", "samples", "hours")
        for kept in [_bends(step, reduced.last[name])]
    }


def _bends(step: Column, value: Column) -> NDArray[np.intp]:
    """Return the indices of the ends and of the points where the slope changes; every n-th if too
    many."""
    if len(step) < 3:
        return np.arange(len(step))
    slopes = np.diff(value) / np.diff(step)
    bent = ~np.isclose(slopes[1:], slopes[:-1], rtol=1e-9, atol=0.0)
    kept = np.flatnonzero(np.concatenate([[True], bent, [True]]))
    if len(kept) > _MOST_KNOTS:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, _MOST_KNOTS).round().astype(int))]
    return kept


def _float32(column: Column) -> str:
    with np.errstate(over="ignore"):
        return _base64(column.astype("<f4"))


def _float64(column: Column) -> str:
    return _base64(column.astype("<f8"))


def _base64(column: NDArray[np.generic]) -> str:
    return base64.b64encode(column.tobytes()).decode("ascii")


def mean_of(run: Run, prefix: str) -> Mapping[str, float]:
    """Return the mean over the run of the series of an object, by entry. For peaks see
    `peak_of`."""
    return _entries(run, prefix, lambda one: float(np.nanmean(one.mean)))


def peak_of(run: Run, prefix: str) -> Mapping[str, float]:
    """Return the largest value of each series of an object, by entry."""
    return _entries(run, prefix, lambda one: float(np.nanmax(one.maximum)))


def _entries(run: Run, prefix: str, figure: Callable[[Bucketed], float]) -> dict[str, float]:
    series = run.metrics.steps.reduced().series
    return {
        name.partition("/")[2]: figure(one)
        for name, one in series.items()
        if name.startswith(f"{prefix}/") and not np.isnan(one.mean).all()
    }


def curve_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return each curve of each run: its label, first and last value, extremes and mean."""
    return [
        _row(run.name if len(runs) > 1 else "", chart, name, reduced_of(chart, run).series[name])
        for chart in CHARTS
        for run in runs
        for name in names_of(chart, run)
    ]


def _row(run: str, chart: Chart, name: str, series: Bucketed) -> tuple[str, list[str]]:
    entry = _entry(chart, name).removesuffix("_seconds")
    words = [run, chart.title, entry]
    label = ": ".join(word for word in words if word) + (f", {chart.unit}" if chart.unit else "")
    known = series.mean[~np.isnan(series.mean)]
    ends = np.nanmin(series.minimum), np.nanmax(series.maximum)
    return label, [
        _figure(float(value) * chart.scale) for value in (known[0], known[-1], *ends, known.mean())
    ]


def _entry(chart: Chart, name: str) -> str:
    """Return the label of a series of `chart`, shown next to the chart's title."""
    if name not in chart.series:
        return name.partition("/")[2]
    several = sum(1 for one in chart.series if not one.endswith("*")) > 1
    return name.replace("_", " ") if several else ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"
