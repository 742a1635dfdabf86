"""Report page: one self-contained HTML file with styles, scripts and data, and without external
URLs.

Everything that comes from a run's files is escaped, and the Content-Security-Policy allows only the
page's own two scripts (by their checksums) and no requests.

Atomic writing of the page; only an older report is overwritten.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import bigtrain
from bigtrain.errors import OutputError
from bigtrain.report.charts import CHARTS, curves_html, names_of, page_data
from bigtrain.report.figures import NOT_KNOWN, count, headline, incidents, notes_of
from bigtrain.report.marks import MEANINGS, Marks, marks_of
from bigtrain.report.prediction import predictions_html
from bigtrain.report.run_files import Run
from bigtrain.report.setup import setup_html
from bigtrain.report.topology import topology_html
from bigtrain.system.files import write_whole, writing

MARKER = '<meta name="generator" content="bigtrain report'
"""Identifies a report; within the first kilobyte of every page."""

_MOST_PROMPTS, _MOST_TEXTS, _MOST_CHARACTERS = 20, 20, 4000
_PROGRAMS = ("data.js", "view.js", "curves.js", "timeline.js", "main.js")


def page_html(runs: Sequence[Run], live: Mapping[str, Any] | None = None) -> str:
    """Return the complete page. `live`: settings of a page that polls the server for updates."""
    marks = [marks_of(run) for run in runs]
    data = {**page_data(runs, marks), **(live or {"live": False})}
    names = ", ".join(run.name for run in runs)
    # The licence requires its text next to the library.
    library = f"/*\n{_static('uPlot.LICENSE')}*/\n{_static('uPlot.iife.min.js')}"
    program = "(() => {\n" + "\n".join(_static(name) for name in _PROGRAMS) + "\n})();"
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; connect-src {connect}; img-src data:; "
        f"base-uri 'none'; form-action 'none'; "
        f"script-src '{_checksum(library)}' '{_checksum(program)}'"
    )
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    sections = sections_html(runs, marks)
    fields = {
        "policy": policy,
        "title": f"{escape(names)} | bigtrain report",
        "heading": escape(names) if len(runs) < 4 else f"{len(runs)} runs",
        "made": f"{'Served' if live else 'Written'} {when} by bigtrain {bigtrain.__version__}",
        "styles": _static("uPlot.min.css") + _static("report.css"),
        "marker": f'{MARKER} {bigtrain.__version__}">',
        "charts": "".join(_figure(chart.name, chart.title, chart.about) for chart in CHARTS),
        "data": json_in_html(data),
        "library": library,
        "program": program,
        **{f"section_{name}": html for name, html in sections.items()},
    }
    # One pass over the template: "{{" in a run's own texts is not replaced.
    head, *rest = _static("page.html").split("{{")
    parts = [head]
    for piece in rest:
        name, _, text = piece.partition("}}")
        parts += [fields[name], text]
    # JSON may contain lone surrogates, which UTF-8 cannot encode.
    return "".join(parts).encode(errors="replace").decode()


def sections_html(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> dict[str, str]:
    """Return the page's sections other than its charts, by name; a live page gets them on each
    update."""
    return {
        "notes": _notes(runs),
        "figures": _figures(runs, marks),
        "events": _events(runs, marks) + _sites(runs),
        "resolution": _resolution(runs),
        "curves": curves_html(runs),
        "absent": _absent(runs),
        "samples": _samples(runs),
        "prediction": predictions_html(runs),
        "topology": _topologies(runs),
        "setup": setup_html(runs),
    }


def json_in_html(value: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: no string in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _static(name: str) -> str:
    return (resources.files("bigtrain.report") / "static" / name).read_text(encoding="utf-8")


def _checksum(program: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()}"


def _topologies(runs: Sequence[Run]) -> str:
    """Return the topologies; runs with the same topology share one drawing."""
    runs_by_topology: dict[str, list[tuple[int, Run]]] = {}
    for number, run in _all(runs):
        runs_by_topology.setdefault(topology_html(run.files.environment), []).append((number, run))
    if len(runs) == 1:
        return next(iter(runs_by_topology))
    return "".join(
        f"<h3>{', '.join(f'{_swatch(n)}{escape(run.name)}' for n, run in named)}</h3>{html}"
        for html, named in runs_by_topology.items()
    )


def _all(runs: Sequence[Run]) -> list[tuple[int, Run]]:
    return list(enumerate(runs))


def _swatch(number: int) -> str:
    return f'<span class="swatch run-{number % 8}"></span>'


def _notes(runs: Sequence[Run]) -> str:
    lines = [
        f"<li>{f'<b>{escape(run.name)}</b>: ' if len(runs) > 1 else ''}{escape(note)}</li>"
        for run in runs
        for note in notes_of(run)
    ]
    return f'<ul class="notes">{"".join(lines)}</ul>' if lines else ""


def _figures(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> str:
    """Return tiles for one run, a table for several."""
    columns = [[*headline(run), *incidents(run, one)] for run, one in zip(runs, marks, strict=True)]
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
            for name, text in columns[0]
        )
        return f'<dl class="tiles">{tiles}</dl>'
    names = dict.fromkeys(name for column in columns for name, _ in column)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(dict(column).get(name, NOT_KNOWN))}</td>" for column in columns)
        + "</tr>"
        for name in names
    )
    heads = "".join(f'<th scope="col">{_swatch(n)}{escape(run.name)}</th>' for n, run in _all(runs))
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _events(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> str:
    """Return the events as a table for each run, grouped by kind."""
    calm = [run.name for run, kinds in zip(runs, marks, strict=True) if not kinds]
    parts = []
    for run, kinds in zip(runs, marks, strict=True):
        if not kinds:
            continue
        title = f"{escape(run.name)}: " if len(runs) > 1 else ""
        total = sum(one.total for one in kinds)
        rows = "".join(_event_rows(one) for one in kinds)
        parts.append(
            f"<details><summary>{title}{total:,} event{'s' if total != 1 else ''} as a table"
            '</summary><div class="scroll"><table class="events"><thead><tr>'
            '<th scope="col">Step</th><th scope="col">Event</th><th scope="col">What</th></tr>'
            f"</thead><tbody>{rows}</tbody></table></div></details>"
        )
    if calm:
        where = f" in {escape(', '.join(calm))}" if len(calm) < len(runs) else ""
        parts.append(f"<p>No restart, rollback, hang, skipped step or straggler{where}.</p>")
    used = dict.fromkeys(one.kind for kinds in marks for one in kinds if one.kind in MEANINGS)
    meanings = "".join(f"<li><b>{kind}</b>: {MEANINGS[kind]}</li>" for kind in used)
    return "".join(parts) + (f'<ul class="meanings">{meanings}</ul>' if meanings else "")


def _sites(runs: Sequence[Run]) -> str:
    """Return, for each run with several sites, each site's number of outer steps."""
    parts = []
    for run in runs:
        took_part = run.metrics.took_part
        if not took_part.counts:
            continue
        title = f"{escape(run.name)}: " if len(runs) > 1 else ""
        rows = "".join(
            f'<tr><th scope="row">{site}</th><td>{number:,}</td>'
            f"<td>{count(took_part.last.get(site))}</td></tr>"
            for site, number in sorted(took_part.counts.items())
        )
        parts.append(
            f"<details><summary>{title}{len(took_part.counts):,} sites in "
            f"{took_part.num_outer_steps:,} outer steps</summary>"
            '<div class="scroll"><table class="numbers"><thead><tr><th scope="col">Site</th>'
            '<th scope="col">Participated in</th><th scope="col">Last outer step</th></tr></thead>'
            f"<tbody>{rows}</tbody></table></div></details>"
        )
    return "".join(parts)


def _samples(runs: Sequence[Run]) -> str:
    """Return each run's completions of its prompts: the newest texts, older ones collapsed."""
    parts = []
    for number, run in _all(runs):
        by_prompt: dict[str, list[tuple[int, str]]] = {}
        for sample in run.files.samples:
            by_prompt.setdefault(sample.prompt, []).append((sample.step, sample.text))
        if by_prompt and len(runs) > 1:
            parts.append(f"<h3>{_swatch(number)}{escape(run.name)}</h3>")
        for prompt, texts in list(by_prompt.items())[:_MOST_PROMPTS]:
            (step, newest), older = texts[-1], texts[-1 - _MOST_TEXTS : -1]
            parts.append(f'<div class="sample">{_sample(step, prompt, newest)}')
            if older:
                inner = "".join(_sample(at, prompt, text) for at, text in reversed(older))
                parts.append(f"<details><summary>{len(older):,} earlier</summary>{inner}</details>")
            parts.append("</div>")
    if not parts:
        return ""
    return f"<h2>Samples</h2>{''.join(parts)}"


def _sample(step: int, prompt: str, text: str) -> str:
    return (
        f'<p class="about">step {step:,}</p>'
        f"<blockquote><b>{escape(prompt)}</b>{escape(text[:_MOST_CHARACTERS])}</blockquote>"
    )


def _event_rows(one: Marks) -> str:
    cells = [("" if step is None else f"{step:,}", text) for step, text in one.rows]
    if one.total > len(one.rows):
        cells.append(("", f"and {one.total - len(one.rows):,} more"))
    return "".join(
        f"<tr><td>{step}</td><td>{escape(one.kind)}</td><td>{escape(text)}</td></tr>"
        for step, text in cells
    )


def _resolution(runs: Sequence[Run]) -> str:
    """Return how many logged steps a point of a curve aggregates, if more than one."""
    widths = {run.name: run.metrics.steps.width for run in runs if run.metrics.steps.width > 1}
    if not widths:
        return ""
    each = " and ".join(f"{width:,} in {escape(name)}" for name, width in widths.items())
    same = len(widths) == len(runs) and len(set(widths.values())) == 1
    number = f"{max(widths.values()):,}" if same else each
    return f'<p class="about">At maximum zoom each point aggregates {number} logged steps.</p>'


def _absent(runs: Sequence[Run]) -> str:
    """Return a sentence that names the charts for which no run has values."""
    missing = [
        chart
        for chart in CHARTS
        if not chart.of_some and not any(names_of(chart, run) for run in runs)
    ]
    if not missing:
        return ""
    titles = ", ".join(chart.title[:1].lower() + chart.title[1:] for chart in missing)
    what = "run has" if len(runs) == 1 else "runs have"
    return f"<p>Not drawn, because the {what} no values: {escape(titles)}.</p>"


def _figure(name: str, title: str, about: str) -> str:
    return (
        f'<figure class="chart" id="chart-{name}" hidden><figcaption><h3>{title}</h3>'
        f'<p class="about">{about}</p></figcaption><div class="readout" aria-hidden="true"></div>'
        f'<div class="plot"></div></figure>'
    )


_REMEDY = "choose another file as --output"
_FIRST_BYTES = 1024


def write_page(path: Path, html: str) -> None:
    """Write the page; replace an older report.

    Raises OutputError if it cannot be written, or if `path` is another file.
    """
    if path.is_dir():
        raise OutputError(
            f"{path}: is a directory -> name a file as --output, {path / 'report.html'}"
        )
    with writing(path, _REMEDY):
        if path.exists() and not _is_report(path):
            raise OutputError(
                f"{path}: exists and is not a bigtrain report, so it is not overwritten "
                "-> choose another file as --output, or remove it first"
            )
        write_whole(path, html.encode())


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(_FIRST_BYTES)
    return not start or MARKER.encode() in start
