"""Events of a run, as marks on the time line and as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigtrain.report.metrics_file import NON_FINITE, OTHER_SITES, SITES
from bigtrain.report.run_files import Run

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
    """Events of a kind in a run.

    steps: positions of marks, ascending, clustered if there are too many; counts: events per mark.
    rows: step (None: not recorded) and text of the first events. total: number of events.
    """

    event_kind: str
    steps: list[int]
    counts: list[int]
    rows: list[tuple[int | None, str]]
    total: int


def marks_of(run: Run) -> list[Marks]:
    """Return the marks of `run` by kind, without kinds that have none."""
    marks: dict[str, Marks] = {}
    rows: list[tuple[int | None, str]] = []
    for start in run.files.starts[1:]:
        text = f"start {start.generation} on {start.host}, {start.since}"
        if start.slurm_job_id:
            text += f", Slurm job {start.slurm_job_id}"
        if start.world_size:
            text += f", {start.world_size:,} rank{'s' if start.world_size != 1 else ''}"
        if start.step is None:
            text += "; its step was not recorded"
        rows.append((start.step, text))
    _put(marks, RESTART, [step for step, _ in rows if step is not None], rows)
    rows = []
    for hang in run.files.hangs:
        # The first indented line of a report names the lagging ranks.
        lagging = [line.strip() for line in hang.text.splitlines() if line.startswith("  ")]
        rows.append(
            (hang.step, f"{hang.time}, {lagging[0][:300] if lagging else 'without a report'}")
        )
    _put(marks, HANG, [hang.step for hang in run.files.hangs], rows)
    events = run.metrics.events
    for name, event_steps in events.steps.items():
        event_kind, steps = _OF_FILE.get(name, name), np.asarray(event_steps, dtype=np.int64)
        rows = [(line["step"], _event_text(event_kind, line)) for line in events.details[name]]
        if event_kind == NON_FINITE:  # skipped steps already have a mark
            steps = np.setdiff1d(steps, np.asarray(events.steps.get("skipped", ()), dtype=np.int64))
            rows = [row for row in rows if row[0] in steps]
        _put(marks, event_kind, steps, rows, len(steps))
    # Kinds that bigtrain defines come first, in their order; then events of user code.
    ordered = [marks.pop(event_kind) for event_kind in KINDS if event_kind in marks]
    return [*ordered, *marks.values()]


def _put(
    marks: dict[str, Marks],
    event_kind: str,
    steps: Sequence[int] | NDArray[np.int64],
    rows: list[tuple[int | None, str]],
    total: int | None = None,
) -> None:
    """Add the events of a kind, which are `total` (default: the number of `rows`)."""
    if not rows:
        return
    positions, counts = np.unique(np.asarray(steps, dtype=np.int64), return_counts=True)
    if len(positions) > _MOST_POSITIONS:  # merge adjacent steps into one mark
        span = int(positions[-1] - positions[0]) + 1
        group = (positions - positions[0]) * _MOST_POSITIONS // span
        begins = np.flatnonzero(np.diff(group, prepend=-1))
        positions, counts = positions[begins], np.add.reduceat(counts, begins)
    num_events = len(rows) if total is None else total
    marks[event_kind] = Marks(
        event_kind, positions.tolist(), counts.tolist(), rows[:_MOST_ROWS], num_events
    )


def _event_text(event_kind: str, line: dict[str, Any]) -> str:
    """Describe the event of a line, which may lack any field."""
    first, number = line.get("first_sample"), line.get("num_samples")
    if type(first) is not int or type(number) is not int or number < 1:
        samples = ""
    else:
        samples = f"; samples {first:,} to {first + number - 1:,}"
    if event_kind == SKIPPED:
        reason = line.get("reason")
        consecutive = line.get("consecutive")
        many = f", {consecutive} in a row" if type(consecutive) is int and consecutive > 1 else ""
        return f"{reason if reason else 'no reason recorded'}{many}{samples}"
    if event_kind == ROLLBACK:
        return f"back to step {_shown(line.get('to_step'))}{samples}"
    if event_kind == STRAGGLER:
        return (
            f"rank {_shown(line.get('rank'))} on {_shown(line.get('host'))}: "
            f"{_shown(line.get('work_seconds'))} s of work, its peers "
            f"{_shown(line.get('median_seconds'))} s{samples}"
        )
    if event_kind == OTHER_SITES:
        sites = line.get(SITES)
        named = ", ".join(_shown(site) for site in sites[:20]) if isinstance(sites, list) else ""
        return f"outer step {_shown(line.get('outer_step'))} with sites {named or 'not recorded'}"
    if event_kind in OF_SITES:
        count = line.get("count")
        many = f", {count:,} times" if type(count) is int and count > 1 else ""
        return (
            f"{_shown(line.get('who'))}: {_shown(line.get('reason'))}{many}; outer step "
            f"{_shown(line.get('outer_step'))}"
        )
    if event_kind == NON_FINITE:
        names = [name for name in ("loss", "grad_norm") if type(line.get(name)) is not float]
        return f"{' and '.join(names)} not finite"
    # An event of user code, whose fields have no known meaning.
    fields = [f"{key} {_shown(line[key])}" for key in line if key not in ("step", "event")]
    return ", ".join(fields)[:300]


def _shown(value: Any) -> str:
    if type(value) is float:
        return f"{value:.4g}"
    if type(value) is int:
        return f"{value:,}"
    return "not recorded" if value is None else str(value)[:100]
