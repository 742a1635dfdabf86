"""Predicted and measured values side by side, as bars and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.report.charts import mean_of, peak_of
from bigtrain.report.figures import NOT_KNOWN, mean, number, peak
from bigtrain.report.metrics_file import BREAKDOWN, PHASES, WAITING
from bigtrain.report.run_files import Prediction, Run

_COLOURS = 10
_WAITING = WAITING.partition("/")[2]


def predictions(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the values of a section per run, and the names of the runs without prediction and
    measurements."""
    silent = [run.name for run in runs if not _says_something(run)]
    shown = [
        {"number": number, "name": run.name, **_of_run(run)}
        for number, run in enumerate(runs)
        if _says_something(run)
    ]
    return {"runs": shown, "silent": ", ".join(silent)}


def _of_run(run: Run) -> dict[str, Any]:
    """Return step time and memory of one run by part, measured and predicted."""
    prediction = run.files.prediction
    steps, phases = mean_of(run, BREAKDOWN), peak_of(run, PHASES)
    measured = {
        name.removesuffix("_seconds"): value for name, value in steps.items() if name != _WAITING
    }
    terms = {} if prediction is None else prediction.terms
    memory_terms = {} if prediction is None else prediction.memory_terms
    longest = max(phases.values(), default=0.0) or 1.0  # peaks do not add up: bars of their own
    return {
        "comparison": [] if prediction is None else _comparison(run, prediction),
        "has_steps": bool(steps),
        "steps": _stacks({"measured, mean": measured, "predicted": terms}, "s"),
        "waiting": _figure(steps[_WAITING]) if _WAITING in steps else "",
        "phases": [
            (_label(name), _figure(value), f"{100 * value / longest:.3f}")
            for name, value in phases.items()
        ],
        "memory": _stacks({"predicted": memory_terms}, "GiB"),
    }


def _says_something(run: Run) -> bool:
    measured = (*mean_of(run, BREAKDOWN), *peak_of(run, PHASES))
    return run.files.prediction is not None or bool(measured)


def _comparison(run: Run, prediction: Prediction) -> list[tuple[str, list[str]]]:
    """Return measured and predicted values and their difference, as text."""
    rows = [
        ("Step time, s", mean(run, "step_seconds"), prediction.step_seconds, 3),
        ("Throughput, tokens/s", mean(run, "tokens_per_second"), prediction.tokens_per_second, 0),
        ("Peak memory, GiB", peak(run, "memory_gib"), prediction.peak_memory_gib, 2),
    ]
    return [
        (name, [number(measured, digits), number(other, digits), _error(measured, other)])
        for name, measured, other, digits in rows
    ]


def _error(measured: float | None, predicted: float | None) -> str:
    if not measured or predicted is None:
        return NOT_KNOWN
    return f"{predicted / measured - 1:+.1%}"


def _stacks(stacks: Mapping[str, Mapping[str, float]], unit: str) -> dict[str, Any] | None:
    """Return stacked bars on one scale, and their parts as rows of a table."""
    shown = {name: parts for name, parts in stacks.items() if parts}
    longest = max((sum(parts.values()) for parts in shown.values()), default=0.0)
    if not longest:
        return None
    names = list(dict.fromkeys(part for parts in shown.values() for part in parts))
    colour = {name: number % _COLOURS for number, name in enumerate(names)}
    bars = [
        (
            title,
            _figure(sum(parts.values())),
            [
                (colour[name], f"{100 * value / longest:.3f}", _label(name), _figure(value))
                for name, value in parts.items()
            ],
        )
        for title, parts in shown.items()
    ]
    rows = [
        (colour[name], _label(name), [_figure(parts.get(name)) for parts in shown.values()])
        for name in names
    ]
    return {"unit": unit, "bars": bars, "rows": rows}


def _label(name: str) -> str:
    return name.replace("_", " ")


def _figure(value: float | None) -> str:
    """Format with four significant digits: parts of a step range from microseconds to seconds."""
    return NOT_KNOWN if value is None else f"{value:.4g}"
