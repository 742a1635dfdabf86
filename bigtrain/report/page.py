"""Report page: one self-contained HTML file with styles, scripts and data, and without external
URLs. It is written atomically, over an older report only.

Everything that comes from a run's files is escaped, and the Content-Security-Policy allows only the
page's own two scripts (by their checksums) and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import bigtrain
from bigtrain.errors import OutputError
from bigtrain.report.charts import CHARTS, curve_rows, names_of, page_data
from bigtrain.report.figures import NOT_KNOWN, count, headline, incidents, notes_of
from bigtrain.report.marks import MEANINGS, Marks, marks_of
from bigtrain.report.prediction import predictions
from bigtrain.report.run_files import Run
from bigtrain.report.setup import setup
from bigtrain.report.templates import STATIC, page, section
from bigtrain.report.topology import topology_html
from bigtrain.system.files import write_whole, writing

MARKER = '<meta name="generator" content="bigtrain report'
"""Text by which a report is recognized, in the first kilobyte of every page."""

_MAX_PROMPTS, _MAX_TEXTS, _MAX_CHARACTERS = 20, 20, 4000
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
    written_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    html = page(
        policy=policy,
        title=f"{names} | bigtrain report",
        heading=names if len(runs) < 4 else f"{len(runs)} runs",
        made=f"{'Served' if live else 'Written'} {written_at} by bigtrain {bigtrain.__version__}",
        styles=_static("uPlot.min.css") + _static("report.css"),
        marker=f'{MARKER} {bigtrain.__version__}">',
        charts=CHARTS,
        data=json_in_html(data),
        library=library,
        program=program,
        sections=sections_html(runs, marks, is_live=live is not None),
    )
    # JSON may contain lone surrogates, which UTF-8 cannot encode.
    return html.encode(errors="replace").decode()


def sections_html(
    runs: Sequence[Run], marks: Sequence[Sequence[Marks]], *, is_live: bool
) -> dict[str, str]:
    """Return the page's sections other than its charts, by name; a live page gets them on each
    update."""
    # Titles, within a sentence, of the charts for which no run has values.
    absent_titles = [
        chart.title[:1].lower() + chart.title[1:]
        for chart in CHARTS
        if not chart.only_some_runs and not any(names_of(chart, run) for run in runs)
    ]
    values = {
        "notes": {"lines": [(run.name, note) for run in runs for note in notes_of(run)]},
        "events": _events_by_run(runs, marks),
        "absent": {"titles": ", ".join(absent_titles)},
        "samples": {"runs": _samples_by_run(runs)},
        "prediction": predictions(runs),
    }
    # Summary statistics: a row for each name, with the text of each run.
    texts_by_run = [
        dict([*headline(run, is_live), *incidents(run, run_marks)])
        for run, run_marks in zip(runs, marks, strict=True)
    ]
    statistics = dict.fromkeys(name for texts in texts_by_run for name in texts)
    rows = [(name, [texts.get(name, NOT_KNOWN) for texts in texts_by_run]) for name in statistics]
    # The logged steps that a point of a curve aggregates, if more than one.
    widths = {run.name: run.metrics.steps.width for run in runs if run.metrics.steps.width > 1}
    if len(widths) == len(runs) and len(set(widths.values())) == 1:
        resolution = f"{max(widths.values()):,}"
    else:
        resolution = " and ".join(f"{width:,} in {name}" for name, width in widths.items())
    # Runs (number and name) with equal topologies share a drawing.
    runs_by_drawing: dict[str, list[tuple[int, str]]] = {}
    for number, run in enumerate(runs):
        drawing = topology_html(run.files.environment)
        runs_by_drawing.setdefault(drawing, []).append((number, run.name))
    groups = [(numbered_names, drawing) for drawing, numbered_names in runs_by_drawing.items()]
    several, names = len(runs) > 1, [run.name for run in runs]
    return {
        **{name: section(name, several=several, **arguments) for name, arguments in values.items()},
        "figures": section("figures", names=names, rows=rows),
        "resolution": section("resolution", number=resolution),
        "curves": section("curves", rows=curve_rows(runs)),
        "topology": section("topologies", groups=groups) if several else groups[0][1],
        "setup": section("setup", names=names, **setup(runs)),
    }


def json_in_html(value: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: no string can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def _static(name: str) -> str:
    """Return the text of a file in `static/`."""
    return (STATIC / name).read_text(encoding="utf-8")


def _checksum(program: str) -> str:
    """Return the checksum of a script, as a Content-Security-Policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()}"


def _events_by_run(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> dict[str, Any]:
    """Return the values of the template: a table of events for each run, the runs without events,
    the meanings of the kinds, and the participation of sites in outer steps."""
    # A table for each run with events; a sentence names the runs without.
    tables, calm = [], []
    for run, run_marks in zip(runs, marks, strict=True):
        if not run_marks:
            calm.append(run.name)
            continue
        rows = []
        for events in run_marks:
            rows += [
                ("" if row.step is None else f"{row.step:,}", events.event_kind, row.text)
                for row in events.rows
            ]
            if events.total > len(events.rows):
                num_omitted = events.total - len(events.rows)
                rows.append(("", events.event_kind, f"and {num_omitted:,} more"))
        tables.append((run.name, sum(events.total for events in run_marks), rows))
    event_kinds = dict.fromkeys(events.event_kind for run_marks in marks for events in run_marks)
    sites = []
    for run in runs:
        participation = run.metrics.participation
        if participation.counts:
            site_rows = [
                (site, num_outer_steps, count(participation.last.get(site)))
                for site, num_outer_steps in sorted(participation.counts.items())
            ]
            sites.append((run.name, participation.num_outer_steps, site_rows))
    return {
        "tables": tables,
        "calm": calm,
        "where": ", ".join(calm) if tables else "",
        "meanings": [(name, MEANINGS[name]) for name in event_kinds if name in MEANINGS],
        "sites": sites,
    }


def _samples_by_run(runs: Sequence[Run]) -> list[tuple[int, str, list[Any]]]:
    """Return, for each run with samples, number and name, and for each prompt the newest
    completion (step, text) and older ones."""
    samples = []
    for number, run in enumerate(runs):
        texts_by_prompt: dict[str, list[tuple[int, str]]] = {}
        for sample in run.files.samples:
            text = sample.text[:_MAX_CHARACTERS]
            texts_by_prompt.setdefault(sample.prompt, []).append((sample.step, text))
        if texts_by_prompt:
            prompts = [  # prompt, newest completion, older ones
                (prompt, texts[-1], texts[-1 - _MAX_TEXTS : -1])
                for prompt, texts in list(texts_by_prompt.items())[:_MAX_PROMPTS]
            ]
            samples.append((number, run.name, prompts))
    return samples


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
        if path.exists():
            with path.open("rb") as file:
                beginning = file.read(_FIRST_BYTES)
            if beginning and MARKER.encode() not in beginning:
                raise OutputError(
                    f"{path}: exists and is not a bigtrain report, so it is not overwritten "
                    "-> choose another file as --output, or remove it first"
                )
        write_whole(path, html.encode())
