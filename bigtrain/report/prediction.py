"""Predicted and measured values side by side, as bars and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from bigtrain.report.charts import mean_of, peak_of
from bigtrain.report.figures import NOT_KNOWN, mean, number, peak
from bigtrain.report.metrics_file import BREAKDOWN, PHASES, WAITING
from bigtrain.report.run_files import Prediction, Run

_COLOURS = 10
_WAITING = WAITING.partition("/")[2]


def predictions_html(runs: Sequence[Run]) -> str:
    """Return a section per run; runs without prediction and measurements share one sentence."""
    silent = [run for run in runs if not _says_something(run)]
    parts = []
    for index, run in enumerate(runs):
        if run not in silent:
            swatch = f'<span class="swatch run-{index % 8}"></span>'
            title = f"<h3>{swatch}{escape(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(title + _prediction_html(run))
    if silent:
        names = escape(", ".join(run.name for run in silent))
        parts.append(
            "<p>This run has no prediction.json, and measured neither the parts of a step nor the "
            "memory of each phase.</p>"
            if len(runs) == 1
            else "<p>No prediction.json, and neither the parts of a step nor the memory of each "
            f"phase measured: {names}.</p>"
        )
    return "".join(parts)


def _prediction_html(run: Run) -> str:
    """Return step time and memory of one run by part, measured and predicted."""
    prediction = run.files.prediction
    steps = mean_of(run, BREAKDOWN)
    phases = peak_of(run, PHASES)
    parts = []
    if prediction is None:
        parts.append("<p>This run has no prediction.json, so no comparison is possible.</p>")
    else:
        parts.append(_comparison(run, prediction))
    parts.append("<h4>Seconds of a step</h4>")
    if not steps:
        parts.append("<p>The run did not measure the parts of a step.</p>")
    measured = {
        name.removesuffix("_seconds"): value for name, value in steps.items() if name != _WAITING
    }
    terms = {} if prediction is None else prediction.terms
    parts.append(_stacks({"measured, mean": measured, "predicted": terms}, "s"))
    if _WAITING in steps:
        waiting = f"{_figure(steps[_WAITING])} s of the measured time"
        parts.append(f"<p>In {waiting} the main rank waited for other ranks.</p>")
    parts.append("<h4>GiB of memory</h4>")
    if not phases:
        parts.append("<p>The run did not measure the memory of each phase.</p>")
    else:
        parts.append(_bars("Measured peak by phase", phases, "GiB"))
    if prediction is not None and prediction.memory_terms:
        parts.append(_stacks({"predicted": prediction.memory_terms}, "GiB"))
    return "".join(parts)


def _says_something(run: Run) -> bool:
    measured = (*mean_of(run, BREAKDOWN), *peak_of(run, PHASES))
    return run.files.prediction is not None or bool(measured)


def _comparison(run: Run, prediction: Prediction) -> str:
    """Return a table of measured and predicted values and their difference."""
    rows = [
        ("Step time, s", mean(run, "step_seconds"), prediction.step_seconds, 3),
        ("Throughput, tokens/s", mean(run, "tokens_per_second"), prediction.tokens_per_second, 0),
        ("Peak memory, GiB", peak(run, "memory_gib"), prediction.peak_memory_gib, 2),
    ]
    cells = "".join(
        f'<tr><th scope="row">{name}</th><td>{number(measured, digits)}</td>'
        f"<td>{number(predicted, digits)}</td><td>{_error(measured, predicted)}</td></tr>"
        for name, measured, predicted, digits in rows
    )
    return (
        '<div class="scroll"><table class="numbers"><thead><tr><th scope="col"></th>'
        '<th scope="col">Measured</th><th scope="col">Predicted</th>'
        '<th scope="col">Difference</th></tr></thead>'
        f"<tbody>{cells}</tbody></table></div>"
    )


def _error(measured: float | None, predicted: float | None) -> str:
    if not measured or predicted is None:
        return NOT_KNOWN
    return f"{predicted / measured - 1:+.1%}"


def _stacks(stacks: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Return stacked bars on one scale, and their parts as a table."""
    shown = {name: parts for name, parts in stacks.items() if parts}
    longest = max((sum(parts.values()) for parts in shown.values()), default=0.0)
    if not longest:
        return ""
    names = list(dict.fromkeys(part for parts in shown.values() for part in parts))
    colour = {name: number % _COLOURS for number, name in enumerate(names)}
    bars = []
    for title, parts in shown.items():
        total = sum(parts.values())
        pieces = "".join(
            f'<span class="part part-{colour[name]}" style="width:{100 * value / longest:.3f}%" '
            f'title="{escape(_label(name))}: {_figure(value)} {unit}"></span>'
            for name, value in parts.items()
        )
        bars.append(
            f'<div class="bar"><span class="bar-name">{escape(title)}, '
            f'{_figure(total)} {unit}</span><span class="track">{pieces}</span></div>'
        )
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in shown)
    rows = "".join(
        f'<tr><th scope="row" class="part-name"><span class="swatch part-{colour[name]}"></span>'
        f"{escape(_label(name))}</th>"
        + "".join(f"<td>{_figure(parts.get(name))}</td>" for parts in shown.values())
        + "</tr>"
        for name in names
    )
    return (
        f'<div class="bars" aria-hidden="true">{"".join(bars)}</div>'
        f'<div class="scroll"><table class="numbers"><thead><tr><th scope="col">{unit}</th>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _bars(title: str, values: Mapping[str, float], unit: str) -> str:
    """Return separate bars, not stacked: peaks do not add up."""
    longest = max(values.values()) or 1.0
    rows = "".join(
        f'<tr><th scope="row">{escape(_label(name))}</th><td>{_figure(value)}</td>'
        f'<td class="wide"><span class="track"><span class="part part-0" '
        f'style="width:{100 * value / longest:.3f}%"></span></span></td></tr>'
        for name, value in values.items()
    )
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr><th scope="col">{escape(title)}'
        f'</th><th scope="col">{unit}</th><td></td></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _label(name: str) -> str:
    return name.replace("_", " ")


def _figure(value: float | None) -> str:
    """Format with four significant digits: parts of a step range from microseconds to seconds."""
    return NOT_KNOWN if value is None else f"{value:.4g}"
