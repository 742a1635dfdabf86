"""Events of a run, as marks on the time line and as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigtrain.report.metrics_file import NON_FINITE, OTHER_SITES, SITES
from bigtrain.report.run_files import Run, Start

RESTART, ROLLBACK, HANG = "restart", "rollback", "hang"
SKIPPED, STRAGGLER = "skipped step", "straggler"
ALONE, LEFT_OUT, RETURNED = "site detached", "site excluded", "site rejoined"
REFUSED = "message rejected"
OF_SITES = (ALONE, LEFT_OUT, RETURNED, REFUSED)
KINDS = (RESTART, ROLLBACK, HANG, SKIPPED, NON_FINITE, STRAGGLER, OTHER_SITES, *OF_SITES)
"""Order of the kinds; further events of `metrics.jsonl` follow under their own names."""
_OF_FILE = {
    "rolled_back": ROLLBACK,
    "skipped": SKIPPED,
    "site_alone": ALONE,
    "site_left_out": LEFT_OUT,
    "site_returned": RETURNED,
    "message_refused": REFUSED,
}
MEANINGS = {
    RESTART: "the run was restarted and resumed from a checkpoint",
    ROLLBACK: "the run was rolled back to an earlier checkpoint and skipped samples",
    HANG: "no rank made progress, and the watchdog ended the run",
    SKIPPED: "the update was skipped, because loss or gradient norm was bad",
    NON_FINITE: "a logged step has a non-finite loss or gradient norm, and was not skipped",
    STRAGGLER: "one rank took longer than its peers and slowed down the run",
    OTHER_SITES: "the participating sites differ from those of the previous outer step",
    ALONE: "a site could not reach a server or another site in time, and trained alone",
    LEFT_OUT: "the update of a site was excluded from an outer step",
    RETURNED: "a site joined, rejoined, or loaded the global weights",
    REFUSED: "the outer server rejected a message: corrupted, forged, or replayed",
}

_MOST_POSITIONS = 1000
_MOST_ROWS = 100


@dataclass(frozen=True)
class Marks:
    """Events of one kind in one run.

    steps: positions of marks, ascending, clustered if there are too many; counts: events per mark.
    rows: step (None: not recorded) and text of the first events. total: number of events.
    """

    kind: str
    steps: list[int]
    counts: list[int]
    rows: list[tuple[int | None, str]]
    total: int


def marks_of(run: Run) -> list[Marks]:
    """Return the marks of `run` by kind, without kinds that have none."""
    marks: dict[str, Marks] = {}
    rows: list[tuple[int | None, str]]
    rows = [(start.step, _start_text(start)) for start in run.files.starts[1:]]
    _put(marks, RESTART, [step for step, _ in rows if step is not None], rows)
    rows = [(hang.step, _hang_text(hang.when, hang.text)) for hang in run.files.hangs]
    _put(marks, HANG, [hang.step for hang in run.files.hangs], rows)
    events = run.metrics.events
    for name, every in events.steps.items():
        kind, steps = _OF_FILE.get(name, name), np.asarray(every, dtype=np.int64)
        rows = [(line["step"], _event_text(kind, line)) for line in events.details[name]]
        if kind == NON_FINITE:  # skipped steps already have a mark
            steps = np.setdiff1d(steps, np.asarray(events.steps.get("skipped", ()), dtype=np.int64))
            rows = [row for row in rows if row[0] in steps]
        _put(marks, kind, steps, rows, len(steps))
    known = [marks.pop(kind) for kind in KINDS if kind in marks]
    return [*known, *marks.values()]


def _put(
    marks: dict[str, Marks],
    kind: str,
    steps: Sequence[int] | NDArray[np.int64],
    rows: list[tuple[int | None, str]],
    total: int | None = None,
) -> None:
    if not rows:
        return
    placed, counts = _clustered(steps)
    number = len(rows) if total is None else total
    marks[kind] = Marks(kind, placed, counts, rows[:_MOST_ROWS], number)


def _clustered(steps: Sequence[int] | NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Return distinct steps and their counts; adjacent ones are merged if there are too many."""
    values, counts = np.unique(np.asarray(steps, dtype=np.int64), return_counts=True)
    if len(values) > _MOST_POSITIONS:
        span = int(values[-1] - values[0]) + 1
        group = (values - values[0]) * _MOST_POSITIONS // span
        begins = np.flatnonzero(np.diff(group, prepend=-1))
        values, counts = values[begins], np.add.reduceat(counts, begins)
    return values.tolist(), counts.tolist()


def _start_text(start: Start) -> str:
    text = f"start {start.generation} on {start.host}, {start.since}"
    if start.slurm_job_id:
        text += f", Slurm job {start.slurm_job_id}"
    if start.world_size:
        text += f", {start.world_size:,} rank{'s' if start.world_size != 1 else ''}"
    return text + ("" if start.step is not None else "; its step was not recorded")


def _hang_text(when: str, report: str) -> str:
    """Return the lagging ranks: the first indented line of the report."""
    lagging = [line.strip() for line in report.splitlines() if line.startswith("  ")]
    return f"{when}, {lagging[0][:300] if lagging else 'without a report'}"


def _event_text(kind: str, line: dict[str, Any]) -> str:
    samples = _samples(line)
    if kind == SKIPPED:
        reason = line.get("reason")
        consecutive = line.get("consecutive")
        many = f", {consecutive} in a row" if type(consecutive) is int and consecutive > 1 else ""
        return f"{reason if reason else 'no reason recorded'}{many}{samples}"
    if kind == ROLLBACK:
        return f"back to step {_shown(line.get('to_step'))}{samples}"
    if kind == STRAGGLER:
        return (
            f"rank {_shown(line.get('rank'))} on {_shown(line.get('host'))}: "
            f"{_shown(line.get('work_seconds'))} s of work, its peers "
            f"{_shown(line.get('median_seconds'))} s{samples}"
        )
    if kind == OTHER_SITES:
        sites = line.get(SITES)
        named = ", ".join(_shown(site) for site in sites[:20]) if isinstance(sites, list) else ""
        return f"outer step {_shown(line.get('outer_step'))} with sites {named or 'not recorded'}"
    if kind in OF_SITES:
        count = line.get("count")
        many = f", {count:,} times" if type(count) is int and count > 1 else ""
        return (
            f"{_shown(line.get('who'))}: {_shown(line.get('reason'))}{many}; outer step "
            f"{_shown(line.get('outer_step'))}"
        )
    if kind == NON_FINITE:
        names = [name for name in ("loss", "grad_norm") if type(line.get(name)) is not float]
        return f"{' and '.join(names)} not finite"
    skipped = ("step", "event")
    rest = [f"{key} {_shown(value)}" for key, value in line.items() if key not in skipped]
    return ", ".join(rest)[:300]


def _samples(line: dict[str, Any]) -> str:
    first, number = line.get("first_sample"), line.get("num_samples")
    if type(first) is not int or type(number) is not int or number < 1:
        return ""
    return f"; samples {first:,} to {first + number - 1:,}"


def _shown(value: Any) -> str:
    if type(value) is float:
        return f"{value:.4g}"
    if type(value) is int:
        return f"{value:,}"
    return "not recorded" if value is None else str(value)[:100]
