"""Every event becomes a mark at its step and a row that says what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigtrain.report.marks import Marks, marks_of
from bigtrain.report.run_files import open_runs
from tests.support.run_directories import eventful_run, make_run, step_line


def marks(directory: Path) -> dict[str, Marks]:
    return {one.event_kind: one for one in marks_of(open_runs([directory])[0])}


def test_each_kind_of_an_eventful_run(tmp_path: Path) -> None:
    marks_by_kind = marks(eventful_run(tmp_path / "run"))
    assert {kind: one.steps for kind, one in marks_by_kind.items()} == {
        "restart": [200, 450],
        "rollback": [405],
        "hang": [247],
        "skipped step": [160, 161, 402],
        "straggler": [320],
        "other sites": [200, 300],
    }
    rows = {kind: one.rows[0][1] for kind, one in marks_by_kind.items()}
    assert rows["restart"] == "start 2 on node0, 2026-11-21 10:00:00 UTC, 16 ranks"
    assert rows["rollback"] == "back to step 400; samples 3,200 to 3,239"
    assert "rank 11 on node1 (process 4711): step 247, backward" in rows["hang"]
    assert rows["skipped step"] == "loss is not finite; samples 1,272 to 1,279"
    assert marks_by_kind["skipped step"].rows[1][1].startswith("loss is not finite, 2 in a row; ")
    assert rows["straggler"] == (
        "rank 5 on node0: 0.71 s of work, its peers 0.36 s; samples 2,552 to 2,559"
    )
    assert rows["other sites"] == "outer step 8 with sites 0, 2"


def test_events_of_sites(tmp_path: Path) -> None:
    event = {"first_sample": 0, "num_samples": 8, "outer_step": 3}
    lines: list[dict[str, Any]] = [step_line(step) for step in (10, 20)]
    for step, name, who, reason, count in (
        (10, "site_alone", "site 0", "http://hub:29700 did not answer in time", 1),
        (10, "site_left_out", "site 1", "late", 1),
        (20, "site_returned", "site 1", "joined", 1),
        (20, "message_refused", "10.0.0.9", "forged", 1200),
    ):
        more = {"event": name, "who": who, "reason": reason, "count": count}
        lines.append({"step": step, **event, **more})
    marks_by_kind = marks(make_run(tmp_path / "run", lines))
    assert {kind: one.rows for kind, one in marks_by_kind.items()} == {
        "site detached": [(10, "site 0: http://hub:29700 did not answer in time; outer step 3")],
        "site excluded": [(10, "site 1: late; outer step 3")],
        "site rejoined": [(20, "site 1: joined; outer step 3")],
        "message rejected": [(20, "10.0.0.9: forged, 1,200 times; outer step 3")],
    }


def test_a_step_that_is_not_finite_is_marked_unless_it_was_skipped(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [step_line(1), step_line(2, loss=None), step_line(3)]
    lines += [step_line(4, grad_norm=None), {"step": 4, "event": "skipped"}]
    lines += [step_line(5, loss=None, grad_norm=None)]
    marks_by_kind = marks(make_run(tmp_path / "run", lines))
    assert marks_by_kind["not finite"].steps == [2, 5]
    assert marks_by_kind["not finite"].total == 2
    assert marks_by_kind["not finite"].rows == [
        (2, "loss not finite"),
        (5, "loss and grad_norm not finite"),
    ]


def test_an_event_of_a_later_version_keeps_its_name(tmp_path: Path) -> None:
    lines = [step_line(9), {"step": 5, "event": "<b>melted</b>", "rank": 3, "celsius": 101.5}]
    [melted] = marks(make_run(tmp_path / "run", lines)).values()
    assert (melted.event_kind, melted.steps) == ("<b>melted</b>", [5])
    assert melted.rows == [(5, "rank 3, celsius 101.5")]


def test_events_of_other_forms_are_told_without_details(tmp_path: Path) -> None:
    lines = [{"step": 5, "event": name} for name in ("skipped", "rolled_back", "straggler")]
    marks_by_kind = marks(make_run(tmp_path / "run", [*lines, {"step": 6, "event": None}]))
    assert marks_by_kind["skipped step"].rows == [(5, "no reason recorded")]
    assert marks_by_kind["rollback"].rows == [(5, "back to step not recorded")]
    assert "rank not recorded" in marks_by_kind["straggler"].rows[0][1]
    assert marks_by_kind["None"].steps == [6]


def test_neighbours_of_thousands_are_one_mark(tmp_path: Path) -> None:
    lines = [{"step": step, "event": "straggler", "rank": step} for step in (7, 7, 9)]
    lines += [{"step": step, "event": "skipped"} for step in range(1, 50_001)]
    marks_by_kind = marks(make_run(tmp_path / "run", lines))
    stragglers, skipped_steps = (marks_by_kind[kind] for kind in ("straggler", "skipped step"))
    assert (stragglers.steps, stragglers.counts, stragglers.total) == ([7, 9], [2, 1], 3)
    assert skipped_steps.total == 50_000
    assert len(skipped_steps.steps) <= 1000
    assert sum(skipped_steps.counts) == 50_000
    assert skipped_steps.steps == sorted(set(skipped_steps.steps))
    assert skipped_steps.steps[0] == 1
    assert skipped_steps.steps[-1] > 49_900
    assert len(skipped_steps.rows) == 100


def test_a_restart_that_did_not_record_its_step_is_in_the_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    (run / "generations").mkdir()
    for number in (1, 2):
        holder = {"generation": number, "host": "a", "since": "then", "slurm_job_id": "12"}
        (run / "generations" / f"{number:08d}.json").write_text(json.dumps(holder))
    restarts = marks(run)["restart"]
    assert restarts.steps == []
    assert restarts.total == 1
    assert restarts.rows == [(None, "start 2 on a, then, Slurm job 12; its step was not recorded")]


@pytest.mark.parametrize("report", [None, "", "no line that is indented"])
def test_a_hang_without_a_report(tmp_path: Path, report: str | None) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    hang = run / "hangs" / "step-00000003-aa"
    hang.mkdir(parents=True)
    (run / "hangs" / "something").mkdir()
    if report is not None:
        (hang / "report.txt").write_text(report)
    hangs = marks(run)["hang"]
    assert hangs.steps == [3]
    assert hangs.rows[0][1].endswith("UTC, without a report")
