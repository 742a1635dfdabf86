"""Events of a run, as marks on the time line and as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bigtrain.report.metrics_file import NON_FINITE, OTHER_SITES, SITES
from bigtrain.report.run_files import Run

RESTART, ROLLBACK, HANG = "restart", "rollback", "hang"
SKIPPED, STRAGGLER = "skipped step", "straggler"
DETACHED, EXCLUDED, REJOINED = "site detached", "site excluded", "site rejoined"
REJECTED = "message rejected"
SITE_KINDS = (DETACHED, EXCLUDED, REJOINED, REJECTED)
KINDS = (RESTART, ROLLBACK, HANG, SKIPPED, NON_FINITE, STRAGGLER, OTHER_SITES, *SITE_KINDS)
"""Order of the kinds; further events of `metrics.jsonl` follow under their own names."""
_KIND_BY_EVENT = {
    "rolled_back": ROLLBACK,
    "skipped": SKIPPED,
    "site_alone": DETACHED,
    "site_left_out": EXCLUDED,
    "site_returned": REJOINED,
    "message_refused": REJECTED,
}
MEANINGS = {
    RESTART: "the run was restarted and resumed from a checkpoint",
    ROLLBACK: "the run was rolled back to an earlier checkpoint and skipped samples",
    HANG: "no rank made progress, and the watchdog ended the run",
    SKIPPED: "the update was skipped, because loss or gradient norm was bad",
    NON_FINITE: "a logged step has a non-finite loss or gradient norm, and was not skipped",
    STRAGGLER: "one rank took longer than its peers and slowed down the run",
    OTHER_SITES: "the participating sites differ from those of the previous outer step",
    DETACHED: "a site could not reach a server or another site in time, and trained alone",
    EXCLUDED: "the update of a site was excluded from an outer step",
    REJOINED: "a site joined, rejoined, or loaded the global weights",
    REJECTED: "the outer server rejected a message: corrupted, forged, or replayed",
}

_MAX_POSITIONS = 1000
_MAX_ROWS = 100


class EventRow(NamedTuple):
    """Row of the table of events; step: None if it was not recorded."""

    step: int | None
    text: str


@dataclass(frozen=True)
class Marks:
    """Events of a kind in a run.

    steps: positions of marks, ascending, clustered if there are too many; counts: events per mark.
    rows: of the first events. total: number of events.
    """

    event_kind: str
    steps: list[int]
    counts: list[int]
    rows: list[EventRow]
    total: int


def marks_of(run: Run) -> list[Marks]:
    """Return the marks of `run`, one object for each kind that has events."""
    marks: dict[str, Marks] = {}
    # Restarts: every launch but the first.
    rows: list[EventRow] = []
    for start in run.files.starts[1:]:
        text = f"start {start.generation} on {start.host}, {start.since}"
        if start.slurm_job_id:
            text += f", Slurm job {start.slurm_job_id}"
        if start.world_size:
            text += f", {start.world_size:,} rank{'s' if start.world_size != 1 else ''}"
        if start.step is None:
            text += "; its step was not recorded"
        rows.append(EventRow(start.step, text))
    _add_marks(marks, RESTART, [row.step for row in rows if row.step is not None], rows)
    # Hangs.
    rows = []
    for hang in run.files.hangs:
        # The first indented line of a report names the lagging ranks.
        lagging = [line.strip() for line in hang.text.splitlines() if line.startswith("  ")]
        report = lagging[0][:300] if lagging else "without a report"
        rows.append(EventRow(hang.step, f"{hang.time}, {report}"))
    _add_marks(marks, HANG, [hang.step for hang in run.files.hangs], rows)
    # Events of the metrics. Of steps that are not finite, the skipped ones already have a mark.
    events = run.metrics.events
    skipped_steps = np.asarray(events.steps.get("skipped", ()), dtype=np.int64)
    for name, event_steps in events.steps.items():
        event_kind, steps = _KIND_BY_EVENT.get(name, name), np.asarray(event_steps, dtype=np.int64)
        rows = [
            EventRow(line["step"], _event_text(event_kind, line)) for line in events.details[name]
        ]
        if event_kind == NON_FINITE:
            steps = np.setdiff1d(steps, skipped_steps)
            rows = [row for row in rows if row.step in steps]
        _add_marks(marks, event_kind, steps, rows, len(steps))
    # Kinds that bigtrain defines come first, in their order; then events of user code.
    ordered = [marks.pop(event_kind) for event_kind in KINDS if event_kind in marks]
    return [*ordered, *marks.values()]


def _add_marks(
    marks: dict[str, Marks],
    event_kind: str,
    steps: Sequence[int] | NDArray[np.int64],
    rows: list[EventRow],
    total: int | None = None,
) -> None:
    """Add the events of a kind to `marks`. total: number of events (default: of `rows`)."""
    if not rows:
        return
    positions, counts = np.unique(np.asarray(steps, dtype=np.int64), return_counts=True)
    if len(positions) > _MAX_POSITIONS:  # merge adjacent steps into one mark
        num_steps = int(positions[-1] - positions[0]) + 1
        groups = (positions - positions[0]) * _MAX_POSITIONS // num_steps
        begins = np.flatnonzero(np.diff(groups, prepend=-1))  # first index of each group
        positions, counts = positions[begins], np.add.reduceat(counts, begins)
    num_events = len(rows) if total is None else total
    marks[event_kind] = Marks(
        event_kind, positions.tolist(), counts.tolist(), rows[:_MAX_ROWS], num_events
    )


def _event_text(event_kind: str, line: dict[str, Any]) -> str:
    """Return the text of an event's line, which may lack any field."""
    first_sample, num_samples = line.get("first_sample"), line.get("num_samples")
    samples = ""
    if type(first_sample) is int and type(num_samples) is int and num_samples >= 1:
        samples = f"; samples {first_sample:,} to {first_sample + num_samples - 1:,}"
    if event_kind == SKIPPED:
        reason = line.get("reason")
        consecutive = line.get("consecutive")
        run_text = ""
        if type(consecutive) is int and consecutive > 1:
            run_text = f", {consecutive} in a row"
        return f"{reason if reason else 'no reason recorded'}{run_text}{samples}"
    if event_kind == ROLLBACK:
        return f"back to step {_field_text(line.get('to_step'))}{samples}"
    if event_kind == STRAGGLER:
        return (
            f"rank {_field_text(line.get('rank'))} on {_field_text(line.get('host'))}: "
            f"{_field_text(line.get('work_seconds'))} s of work, its peers "
            f"{_field_text(line.get('median_seconds'))} s{samples}"
        )
    if event_kind == OTHER_SITES:
        sites = line.get(SITES)
        site_list = sites[:20] if isinstance(sites, list) else []
        sites_text = ", ".join(map(_field_text, site_list)) or "not recorded"
        return f"outer step {_field_text(line.get('outer_step'))} with sites {sites_text}"
    if event_kind in SITE_KINDS:
        count = line.get("count")
        times = f", {count:,} times" if type(count) is int and count > 1 else ""
        return (
            f"{_field_text(line.get('who'))}: {_field_text(line.get('reason'))}{times}; outer step "
            f"{_field_text(line.get('outer_step'))}"
        )
    if event_kind == NON_FINITE:
        names = [name for name in ("loss", "grad_norm") if type(line.get(name)) is not float]
        return f"{' and '.join(names)} not finite"
    # An event of user code, whose fields have no known meaning.
    fields = [f"{key} {_field_text(line[key])}" for key in line if key not in ("step", "event")]
    return ", ".join(fields)[:300]


def _field_text(value: Any) -> str:
    """Return the value of a field as short text."""
    if type(value) is float:
        return f"{value:.4g}"
    if type(value) is int:
        return f"{value:,}"
    return "not recorded" if value is None else str(value)[:100]
