"""Predicted and measured values side by side, as bars and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.report.charts import mean_of, peak_of
from bigtrain.report.figures import NOT_KNOWN, mean, number, peak
from bigtrain.report.metrics_file import BREAKDOWN, PHASES, WAITING
from bigtrain.report.run_files import Prediction, Run

_NUM_COLOURS = 10
_WAITING_ENTRY = WAITING.partition("/")[2]


def predictions(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the values of the template: a section for each run, and a text with the names of runs
    without prediction and measurements."""
    sections, silent = [], []
    for run_number, run in enumerate(runs):
        prediction = run.files.prediction
        step_seconds = mean_of(run, BREAKDOWN)  # by part of a step
        peak_gib = peak_of(run, PHASES)  # by part of a step
        if prediction is None and not step_seconds and not peak_gib:
            silent.append(run.name)
            continue
        measured = {
            name.removesuffix("_seconds"): seconds
            for name, seconds in step_seconds.items()
            if name != _WAITING_ENTRY  # a part of other parts, shown next to the stack
        }
        waiting = step_seconds.get(_WAITING_ENTRY)
        terms = {} if prediction is None else prediction.terms
        memory_terms = {} if prediction is None else prediction.memory_terms
        # Peaks do not add up, so each has a separate bar; the largest is 100% wide.
        largest = max(peak_gib.values(), default=0.0) or 1.0
        section = {
            "number": run_number,
            "name": run.name,
            "comparison": [] if prediction is None else _comparison(run, prediction),
            "has_steps": bool(step_seconds),
            "steps": _stacked_bars({"measured, mean": measured, "predicted": terms}, "s"),
            "waiting": "" if waiting is None else _four_digits(waiting),
            "phases": [  # label, figure, width of the bar in percent
                (name.replace("_", " "), _four_digits(gib), f"{100 * gib / largest:.3f}")
                for name, gib in peak_gib.items()
            ],
            "memory": _stacked_bars({"predicted": memory_terms}, "GiB"),
        }
        sections.append(section)
    return {"runs": sections, "silent": ", ".join(silent)}


def _comparison(run: Run, prediction: Prediction) -> list[tuple[str, list[str]]]:
    """Return rows of a table: a name, and texts of the measured and predicted value and their
    difference."""
    rows = [  # name, measured and predicted value, decimals
        ("Step time, s", mean(run, "step_seconds"), prediction.step_seconds, 3),
        ("Throughput, tokens/s", mean(run, "tokens_per_second"), prediction.tokens_per_second, 0),
        ("Peak memory, GiB", peak(run, "memory_gib"), prediction.peak_memory_gib, 2),
    ]
    comparison = []
    for name, measured, predicted, digits in rows:
        difference = NOT_KNOWN
        if measured and predicted is not None:
            difference = f"{predicted / measured - 1:+.1%}"
        texts = [number(measured, digits), number(predicted, digits), difference]
        comparison.append((name, texts))
    return comparison


def _stacked_bars(stacks: Mapping[str, Mapping[str, float]], unit: str) -> dict[str, Any] | None:
    """Return stacked bars on one scale, and their parts as rows of a table; None if all are empty.
    stacks: by title of the bar, its parts by name."""
    filled_stacks = {name: parts for name, parts in stacks.items() if parts}
    longest = max((sum(parts.values()) for parts in filled_stacks.values()), default=0.0)
    if not longest:
        return None
    names = list(dict.fromkeys(part for parts in filled_stacks.values() for part in parts))
    colour = {name: number % _NUM_COLOURS for number, name in enumerate(names)}
    labels = {name: name.replace("_", " ") for name in names}
    bars = [  # title, total, parts: colour, width in percent, label, value
        (
            title,
            _four_digits(sum(parts.values())),
            [
                (colour[name], f"{100 * value / longest:.3f}", labels[name], _four_digits(value))
                for name, value in parts.items()
            ],
        )
        for title, parts in filled_stacks.items()
    ]
    rows = [  # colour, label, value in each bar
        (
            colour[name],
            labels[name],
            [_four_digits(parts.get(name)) for parts in filled_stacks.values()],
        )
        for name in names
    ]
    return {"unit": unit, "bars": bars, "rows": rows}


def _four_digits(value: float | None) -> str:
    """Format with four significant digits: parts of a step range from microseconds to seconds."""
    return NOT_KNOWN if value is None else f"{value:.4g}"
