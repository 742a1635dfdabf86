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
    # The titles of the charts for which no run has values, as words within a sentence.
    titles = [
        chart.title[:1].lower() + chart.title[1:]
        for chart in CHARTS
        if not chart.only_some_runs and not any(names_of(chart, run) for run in runs)
    ]
    values = {
        "notes": {"lines": [(run.name, note) for run in runs for note in notes_of(run)]},
        "events": _events(runs, marks),
        "absent": {"titles": ", ".join(titles)},
        "samples": {"runs": _samples(runs)},
        "prediction": predictions(runs),
    }
    # The summary statistics by name, with a text for each run, which may lack it.
    columns = [
        dict([*headline(run, is_live), *incidents(run, run_marks)])
        for run, run_marks in zip(runs, marks, strict=True)
    ]
    statistics = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name, NOT_KNOWN) for column in columns]) for name in statistics]
    # How many logged steps a point of a curve aggregates, if more than one.
    widths = {run.name: run.metrics.steps.width for run in runs if run.metrics.steps.width > 1}
    if len(widths) == len(runs) and len(set(widths.values())) == 1:
        resolution = f"{max(widths.values()):,}"
    else:
        resolution = " and ".join(f"{width:,} in {name}" for name, width in widths.items())
    several, names = len(runs) > 1, [run.name for run in runs]
    # Runs with equal topologies share a drawing.
    runs_by_topology: dict[str, list[tuple[int, str]]] = {}
    for number, run in enumerate(runs):
        html = topology_html(run.files.environment)
        runs_by_topology.setdefault(html, []).append((number, run.name))
    groups = [(named, html) for html, named in runs_by_topology.items()]
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
    return (STATIC / name).read_text(encoding="utf-8")


def _checksum(program: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()}"


def _events(runs: Sequence[Run], marks: Sequence[Sequence[Marks]]) -> dict[str, Any]:
    """Return the events by run and kind, and how many outer steps the sites of a run took part
    in."""
    # A table for each run with events; runs without are named in a sentence.
    tables, calm = [], []
    for run, run_marks in zip(runs, marks, strict=True):
        if not run_marks:
            calm.append(run.name)
            continue
        rows = []
        for events in run_marks:
            rows += [
                ("" if step is None else f"{step:,}", events.event_kind, text)
                for step, text in events.rows
            ]
            if events.total > len(events.rows):
                num_omitted = events.total - len(events.rows)
                rows.append(("", events.event_kind, f"and {num_omitted:,} more"))
        tables.append((run.name, sum(events.total for events in run_marks), rows))
    event_kinds = dict.fromkeys(events.event_kind for run_marks in marks for events in run_marks)
    sites = []
    for run in runs:
        took_part = run.metrics.took_part
        if took_part.counts:
            rows_by_site = [
                (site, number, count(took_part.last.get(site)))
                for site, number in sorted(took_part.counts.items())
            ]
            sites.append((run.name, took_part.num_outer_steps, rows_by_site))
    return {
        "tables": tables,
        "calm": calm,
        "where": ", ".join(calm) if tables else "",
        "meanings": [(name, MEANINGS[name]) for name in event_kinds if name in MEANINGS],
        "sites": sites,
    }


def _samples(runs: Sequence[Run]) -> list[tuple[int, str, list[Any]]]:
    """Return each run's completions of its prompts: the newest (step, text), and older ones."""
    samples = []
    for number, run in enumerate(runs):
        texts_by_prompt: dict[str, list[tuple[int, str]]] = {}
        for sample in run.files.samples:
            text = sample.text[:_MOST_CHARACTERS]
            texts_by_prompt.setdefault(sample.prompt, []).append((sample.step, text))
        if texts_by_prompt:
            prompts = [
                (prompt, texts[-1], texts[-1 - _MOST_TEXTS : -1])
                for prompt, texts in list(texts_by_prompt.items())[:_MOST_PROMPTS]
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
