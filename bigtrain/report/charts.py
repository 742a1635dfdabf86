"""Which curves the page draws, and their data in the format that the browser reads.

Columns are base64 of little-endian numbers, which a browser decodes into typed arrays: a million
logged steps are a few megabytes. Values are float32, steps float64.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigtrain.report.marks import Marks
from bigtrain.report.metrics_file import (
    BITS,
    BREAKDOWN,
    EXCHANGE,
    EXPERTS,
    MEAN_OF_LAYERS,
    MOST_OF_LAYERS,
    PHASES,
    SENT_BY_OPTIMIZER,
    SITES,
    SOURCES,
    TABLES,
    TASKS,
    WAITING,
)
from bigtrain.report.reduction import Bucketed, Column, Reduced
from bigtrain.report.run import Run

_MOST_KNOTS = 2048


@dataclass(frozen=True)
class Chart:
    """One chart.

    table: one of `TABLES`; series: names there, or ``OBJECT/*`` for all entries of an object, if
    there are at most `most_entries`. predicted: field of the prediction to draw as well. stacked:
    as stacked areas, per run; apart: series that are contained in the others, drawn as lines over
    them. scale: factor on the file's values. of_some: not reported as missing, since only some runs
    have it (a mixture of experts, several sites). from_zero: the axis begins there.
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


CHARTS = (
    Chart(
        "loss",
        "Training loss",
        "nats per token",
        "Mean over the target tokens since the last logged step.",
        "steps",
        ("loss",),
        logarithmic=True,
    ),
    Chart(
        "held-out-loss",
        "Held-out loss",
        "nats per token",
        "Of each evaluation; of a mixture also each source's own, dashed.",
        "evaluations",
        ("held_out_loss", f"{SOURCES}/*"),
        logarithmic=True,
    ),
    Chart(
        "bits-per-byte",
        "Held-out bits per byte",
        "bits per byte",
        "Of each evaluation: comparable between tokenizers.",
        "evaluations",
        (BITS,),
        of_some=True,
    ),
    Chart(
        "tasks",
        "Tasks",
        "",
        "Metrics of lm-eval's tasks, by task and metric.",
        "evaluations",
        (f"{TASKS}/*",),
        of_some=True,
    ),
    Chart("lr", "Learning rate", "", "Used in the step.", "steps", ("lr",)),
    Chart(
        "grad-norm",
        "Gradient norm",
        "",
        "Before clipping.",
        "steps",
        ("grad_norm",),
        logarithmic=True,
    ),
    Chart(
        "throughput",
        "Throughput",
        "tokens/s",
        "Of all ranks together, padding included.",
        "steps",
        ("tokens_per_second",),
        predicted="tokens_per_second",
    ),
    Chart(
        "mfu",
        "Model FLOPs utilization",
        "% of peak",
        "Model FLOPs per second divided by the peak of all devices.",
        "steps",
        ("model_flops_utilization",),
        scale=100,
    ),
    Chart(
        "step-time",
        "Step time",
        "s",
        "Wall time of an optimizer step.",
        "steps",
        ("step_seconds",),
        predicted="step_seconds",
    ),
    Chart(
        "breakdown",
        "Step breakdown",
        "s",
        "Where the time of a step goes on the main rank; dashed: waiting for other ranks in it.",
        "steps",
        (f"{BREAKDOWN}/*",),
        stacked=True,
        apart=(WAITING,),
    ),
    Chart(
        "experts",
        "Busiest expert",
        "x mean",
        "Tokens of the busiest expert over the mean of its layer's experts: where that is most, "
        "the mean of all layers and, where they are few, each layer.",
        "steps",
        (MOST_OF_LAYERS, MEAN_OF_LAYERS, f"{EXPERTS}/*"),
        of_some=True,
        most_entries=6,
    ),
    Chart(
        "expert-bytes",
        "Sent between experts' ranks",
        "bytes",
        "By a rank in the exchanges of tokens and gradients of a step, mean of all ranks.",
        "steps",
        (f"{EXCHANGE}/sent_bytes",),
        of_some=True,
        from_zero=True,
    ),
    Chart(
        "expert-seconds",
        "Exchanges between experts' ranks",
        "s",
        "Of a step, waiting for the other ranks included; mean of all ranks.",
        "steps",
        (f"{EXCHANGE}/seconds",),
        of_some=True,
        from_zero=True,
    ),
    Chart(
        "optimizer-bytes",
        "Sent by the optimizer",
        "bytes",
        "By a rank in a step, to bring matrices together (Muon).",
        "steps",
        (f"{SENT_BY_OPTIMIZER}/sent_bytes",),
        of_some=True,
        from_zero=True,
    ),
    Chart(
        "site-bytes",
        "Sent between sites",
        "bytes",
        "In an outer step: by all ranks of this site together.",
        "outer_steps",
        ("sent_bytes", "link_bytes"),
        of_some=True,
        from_zero=True,
    ),
    Chart(
        "site-distance",
        "Distance between sites",
        "",
        "Root mean square of the weights: distance of this site to the mean of all, and change of "
        "the global weights by it.",
        "outer_steps",
        ("distance", "change"),
        logarithmic=True,
        of_some=True,
    ),
    Chart(
        "site-seconds",
        "Outer steps",
        "s",
        "Wall time of an outer step, and how long it waited for other sites.",
        "outer_steps",
        ("seconds", "waited_seconds"),
        of_some=True,
        from_zero=True,
    ),
    Chart(
        "sites",
        "Sites that took part",
        "sites",
        "In an outer step.",
        "outer_steps",
        (SITES,),
        of_some=True,
        from_zero=True,
    ),
    Chart(
        "memory",
        "Peak memory",
        "GiB",
        "Of the main rank so far; by phase where the run measured it, dashed.",
        "steps",
        ("memory_gib", f"{PHASES}/*"),
        predicted="peak_memory_gib",
        from_zero=True,
    ),
)


def names_of(chart: Chart, run: Run) -> list[str]:
    """The series of `chart` that `run` has values of."""
    reduced = reduced_of(chart, run)
    known = [name for name, one in reduced.series.items() if not np.isnan(one.mean).all()]
    found = []
    for wanted in chart.series:
        if wanted.endswith("*"):
            entries = [name for name in known if name.startswith(wanted[:-1])]
            found += entries if len(entries) <= chart.most_entries else []
        elif wanted in known:
            found.append(wanted)
    return sorted(found, key=lambda name: name in chart.apart)


def reduced_of(chart: Chart, run: Run) -> Reduced:
    """The table of `run` that `chart` draws from."""
    return run.metrics.table(chart.table).reduced()


def page_data(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> dict[str, Any]:
    """The data of all charts."""
    return {
        "tables": TABLES,
        "charts": charts_data(runs),
        "runs": [run_data(run, one) for run, one in zip(runs, marks, strict=True)],
    }


def charts_data(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The charts, and which series each run has of them."""
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
            # Those that are no entries of an object: called by the chart's title, or their own.
            "named": [name for name in chart.series if not name.endswith("*")],
            "series": [names_of(chart, run) for run in runs],
        }
        for chart in CHARTS
    ]


def run_data(
    run: Run, marks: Sequence[Marks], since: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The curves and marks of one run; `since`: by table, the first bucket to give."""
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
    """Buckets for the browser: minimum and maximum only where they differ from the mean."""
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
    """Tokens, samples and hours by step, as the knots of a piecewise linear curve."""
    step = reduced.last["step"]
    return {
        name: {"step": _float64(step[kept]), "value": _float64(reduced.last[name][kept])}
        for name in ("tokens", "samples", "hours")
        for kept in [_bends(step, reduced.last[name])]
    }


def _bends(step: Column, value: Column) -> NDArray[np.intp]:
    """Indices of the ends and of the points where the slope changes; every n-th if too many."""
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
    """Mean over the run of the series of an object, by entry. For peaks see `peak_of`."""
    return _entries(run, prefix, lambda one: float(np.nanmean(one.mean)))


def peak_of(run: Run, prefix: str) -> Mapping[str, float]:
    """The largest value of each series of an object, by entry."""
    return _entries(run, prefix, lambda one: float(np.nanmax(one.maximum)))


def _entries(run: Run, prefix: str, figure: Callable[[Bucketed], float]) -> dict[str, float]:
    series = run.metrics.steps.reduced().series
    return {
        name.partition("/")[2]: figure(one)
        for name, one in series.items()
        if name.startswith(f"{prefix}/") and not np.isnan(one.mean).all()
    }
