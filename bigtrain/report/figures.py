"""Summary statistics of runs, as numbers and as human-readable text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigtrain.report.marks import HANG, RESTART, ROLLBACK, SKIPPED, STRAGGLER, Marks
from bigtrain.report.metrics_file import NON_FINITE, OTHER_SITES
from bigtrain.report.run_files import Run, finite

NOT_KNOWN = "\u2013"
"""A dash."""
Rows = list[tuple[str, str]]
"""Names of statistics, with their texts."""
_TIME_LEFT_INDEX = 2
"""Row of the time left: after the steps and the last loss."""
_PACE_POINTS = 50
"""Newest points of the curves, from whose pace the time left is predicted."""


def headline(run: Run, is_live: bool = False) -> Rows:
    """Return the summary statistics of a run. `is_live`: also the time left, for a page that is
    served while the run may still train."""
    metrics, prediction = run.metrics, run.files.prediction
    last = metrics.last or {}
    best = metrics.best or {}
    best_loss = finite(best.get("held_out_loss"))
    best_text = NOT_KNOWN
    if best_loss is not None:
        best_text = f"{number(best_loss, 4)} at step {best['step']:,}"
    total_text = "" if run.total_steps is None else f" of {run.total_steps:,}"
    rows: Rows = [
        ("Steps", f"{last.get('step', 0):,}{total_text}"),
        ("Last loss", number(finite(last.get("loss")), 4)),
        ("Best held-out loss", best_text),
        ("Tokens", count(last.get("tokens"))),
        ("Samples", count(last.get("samples"))),
        ("Training time", duration(training_hours(run) * 3600)),
        ("Throughput, mean", _with_unit(mean(run, "tokens_per_second"), "tokens/s", 0)),
        ("Model FLOPs utilization, mean", percent(mean(run, "model_flops_utilization"))),
        ("Peak memory", _with_unit(peak(run, "memory_gib"), "GiB", 2)),
    ]
    if is_live:
        rows.insert(_TIME_LEFT_INDEX, ("Time left", duration(seconds_left(run))))
    if prediction is not None:
        rows += [
            ("Throughput, predicted", _with_unit(prediction.tokens_per_second, "tokens/s", 0)),
            ("Peak memory, predicted", _with_unit(prediction.peak_memory_gib, "GiB", 2)),
        ]
    return rows


def incidents(run: Run, marks: Sequence[Marks]) -> Rows:
    """Return the number of events by kind, including zeros."""
    totals = {events.event_kind: events.total for events in marks}
    names = {
        RESTART: "Restarts",
        ROLLBACK: "Rollbacks",
        HANG: "Hangs",
        SKIPPED: "Skipped steps",
        NON_FINITE: "Non-finite steps",
        STRAGGLER: "Stragglers",
    }
    if OTHER_SITES in totals:
        names[OTHER_SITES] = "Site changes"
    rows = [(name, f"{totals.pop(event_kind, 0):,}") for event_kind, name in names.items()]
    return rows + [(event_kind, f"{total:,}") for event_kind, total in totals.items()]


def notes_of(run: Run) -> list[str]:
    """Return sentences about missing or unreadable data."""
    metrics = run.metrics
    notes = list(run.files.notes)
    unreadable = metrics.unreadable
    if unreadable.count:
        lines = "1 line was" if unreadable.count == 1 else f"{unreadable.count:,} lines were"
        reasons = "; ".join(unreadable.first)
        if unreadable.count > len(unreadable.first):
            reasons += f", and {unreadable.count - len(unreadable.first):,} more"
        notes.append(f"metrics.jsonl: {lines} skipped: {reasons}.")
    if metrics.last is None:
        notes.append("No step has been logged yet.")
    num_steps = metrics.steps.num_rows
    for name, num_missing in metrics.missing.items():
        # On a CPU the peak FLOPs are unknown, so that the utilization is always null: no gap.
        has_gaps = name != "model_flops_utilization" or num_missing < num_steps
        if num_missing and has_gaps:
            notes.append(
                f"{name} is null in {num_missing:,} of {num_steps:,} logged steps, drawn as gaps."
            )
    starts = run.files.starts[1:]
    num_without_step = sum(1 for start in starts if start.step is None)
    if num_without_step:
        notes.append(
            f"{num_without_step} of {len(starts)} restarts did not record their step, so they are "
            "in the table, not on the time line."
        )
    return notes


def training_hours(run: Run) -> float:
    """Return the hours of the logged steps, without startup and rolled-back steps."""
    hours = run.metrics.steps.reduced().last["hours"]
    return float(hours[-1]) if len(hours) else 0.0


def seconds_left(run: Run) -> float:
    """Return the seconds for the remaining steps at the pace of the newest logged steps, without
    evaluations and checkpoints; infinite if the run's length or pace is unknown."""
    reduced = run.metrics.steps.reduced()
    steps, hours = reduced.last["step"], reduced.last["hours"]
    if run.total_steps is None or not len(steps):
        return math.inf
    first = max(0, len(steps) - 1 - _PACE_POINTS)
    if steps[-1] > steps[first]:  # two points or more
        seconds_per_step = (hours[-1] - hours[first]) * 3600 / (steps[-1] - steps[first])
    else:
        step_seconds = finite((run.metrics.last or {}).get("step_seconds"))
        seconds_per_step = math.inf if step_seconds is None else step_seconds
    num_steps_left = max(0, run.total_steps - int(steps[-1]))
    return float(num_steps_left * seconds_per_step) if num_steps_left else 0.0


def mean(run: Run, name: str) -> float | None:
    """Return the mean of the buckets' means, close to that over the logged steps; None without
    values."""
    series = run.metrics.steps.reduced().series.get(name)
    if series is None or np.isnan(series.mean).all():
        return None
    return float(np.nanmean(series.mean))


def peak(run: Run, name: str) -> float | None:
    """Return the largest value of a series; None without values."""
    series = run.metrics.steps.reduced().series.get(name)
    if series is None or np.isnan(series.maximum).all():
        return None
    return float(np.nanmax(series.maximum))


def number(value: float | None, digits: int) -> str:
    """Format with `digits` decimals and thousands separators; very large and small values with an
    exponent."""
    if value is None:
        return NOT_KNOWN
    if value and (abs(value) >= 1e15 or abs(value) < 0.5 * 10**-digits):
        return f"{value:.3g}"
    return f"{value:,.{digits}f}"


def count(value: Any) -> str:
    """Format an integer; a large one also in short form: 4,194,304,000 (4.19 B)."""
    amount = finite(value)
    if amount is None:
        return NOT_KNOWN
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if amount >= size:
            short_form = f"{amount / size:.3g} {letter}"
            return f"{amount:,.0f} ({short_form})" if amount < 1e18 else f"{amount:.3g}"
    return f"{amount:,.0f}"


def percent(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return NOT_KNOWN if value is None else f"{value:.1%}"


def duration(seconds: float) -> str:
    """Format seconds human-readably: 42 s, 4 min 10 s, 3 h 07 min, 2 d 05 h."""
    if not math.isfinite(seconds):
        return NOT_KNOWN
    total = round(seconds)
    if total < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400:,} d {total % 86400 // 3600:02d} h"


def _with_unit(value: float | None, unit: str, digits: int) -> str:
    """Format a value with its unit; a dash for None."""
    return NOT_KNOWN if value is None else f"{number(value, digits)} {unit}"
