"""metrics.jsonl is read once, whatever is broken in it, and anew where it was cut."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.errors import DataError
from bigtrain.metrics.step_metrics import StepMetrics, is_optional
from bigtrain.report import metrics_file
from bigtrain.report.metrics_file import NON_FINITE, MetricsFile
from bigtrain.run.reporting.metrics import HeldOutLoss
from tests.support.run_directories import evaluation_line, eventful_lines, step_line, write_lines
from tests.support.tiers import examples
from tests.unit.run.reporting.test_metrics import FIELDS, step_metrics, writer


def read(path: Path, final: bool = True) -> MetricsFile:
    metrics = MetricsFile(path)
    metrics.read(final)
    return metrics


def steps_of(metrics: MetricsFile) -> list[int]:
    return [int(step) for step in metrics.steps.reduced().last["step"]]


def loss_of(metrics: MetricsFile) -> list[float]:
    values: list[float] = metrics.steps.reduced().series["loss"].mean.tolist()
    return values


def test_the_fields_are_those_of_a_run() -> None:
    """A field that is renamed there would silently be drawn no more."""
    drawn = {*metrics_file.CURVE_FIELDS, *metrics_file.POSITIONS} - {"hours"}
    optional = {row.name for row in fields(StepMetrics) if is_optional(row)}
    assert drawn - optional <= set(FIELDS)
    # Objects of several figures, which not every run measures.
    assert set(FIELDS) - drawn <= set(metrics_file.OBJECT_FIELDS)


def test_what_a_run_writes_is_read(tmp_path: Path) -> None:
    with writer(tmp_path) as metrics:
        for step in range(1, 8):
            metrics.log_step(step_metrics(step, loss=math.nan if step == 3 else 7.0 - step))
        metrics.log_evaluation(4, HeldOutLoss(2.5, 100))
        metrics.log_outer_step(
            5,
            outer_step=1,
            sites=[0, 1],
            sent_bytes=10,
            link_bytes=5,
            seconds=1.0,
            waited_seconds=0.5,
            change=0.1,
            distance=0.2,
        )
        metrics.log_event("skipped", step=3, first_sample=32, num_samples=16, reason="bad")
    file_metrics = read(tmp_path / "metrics.jsonl")
    assert steps_of(file_metrics) == list(range(1, 8))
    np.testing.assert_array_equal(loss_of(file_metrics), [6, 5, np.nan, 3, 2, 1, 0])
    assert file_metrics.evaluations.reduced().series["held_out_loss"].mean.tolist() == [2.5]
    outer = file_metrics.outer_steps.reduced().series
    assert {name: one.mean.tolist() for name, one in outer.items()} == {
        "sent_bytes": [10],
        "link_bytes": [5],
        "seconds": [1.0],
        "waited_seconds": [0.5],
        "change": [0.1],
        "distance": [0.2],
        "sites": [2],
    }
    assert file_metrics.events.count("skipped") == 1
    assert file_metrics.events.steps[NON_FINITE].tolist() == [3]
    assert +file_metrics.missing == {"loss": 1, "model_flops_utilization": 7}
    assert file_metrics.unreadable.count == 0
    assert file_metrics.steps.reduced().last["hours"][-1] == pytest.approx(7 * 0.5 / 3600)


@pytest.mark.parametrize("final", [True, False])
def test_a_last_line_that_was_cut_off_is_not_there(tmp_path: Path, final: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(1), step_line(2)])
    path.write_bytes(path.read_bytes()[:-40])
    metrics = read(path, final)
    assert steps_of(metrics) == [1]
    assert metrics.unreadable.count == 0
    path.write_text(json.dumps(step_line(10, step_seconds=2.0)))  # only its end is missing
    metrics = read(path)
    assert steps_of(metrics) == [10]
    assert metrics.steps.reduced().last["hours"] * 3600 == pytest.approx([20])  # nine not logged
    write_lines(path, ["x"] * 1000)
    unreadable = read(path).unreadable
    assert (unreadable.count, len(unreadable.first)) == (1000, 5)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 2, "loss"', "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"loss": 2.0}', "line 2 has no step"),
        ('{"step": "2", "loss": 2.0}', "line 2 has no step"),
        ('{"step": 1e400, "loss": 2.0}', "line 2 has no step"),
        ('{"step": 99999999999999999999, "loss": 2.0}', "line 2 has no step"),
        ('{"step": 1, "loss": 2.0}', "line 2 is of step 1, which is not later than before"),
        ('{"step": 2}, {"step": 3}', "line 2 is not JSON"),
        ("\0\0\0\0", "line 2 is not JSON"),
        ("[" * 5000, "line 2 is not JSON"),
    ],
)
def test_an_unreadable_line_is_counted_and_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(1), line, step_line(5)])
    metrics = read(path)
    assert steps_of(metrics) == [1, 5]
    assert (metrics.unreadable.count, metrics.unreadable.first) == (1, [reason])


def test_two_lines_that_are_one_value_together_are_unreadable(tmp_path: Path) -> None:
    """Lines are parsed a block at a time, joined by commas."""
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(1), '{"step": 2, "loss": [1', "2]}", step_line(3)])
    metrics = read(path)
    assert steps_of(metrics) == [1, 3]
    assert metrics.unreadable.first == ["line 2 is not JSON", "line 3 is not JSON"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"2.5"', "true", "[2.5]", "1" * 400, "{}"])
def test_what_is_no_number_is_a_gap(tmp_path: Path, value: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = json.dumps(step_line(2)).replace('"lr": 0.0003', f'"lr": {value}')
    write_lines(path, [step_line(1), text, step_line(3)])
    metrics = read(path)
    np.testing.assert_array_equal(
        metrics.steps.reduced().series["lr"].mean, [np.float64(3e-4), np.nan, np.float64(3e-4)]
    )
    assert metrics.missing["lr"] == 1


def test_sources_and_breakdown_are_series_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, eventful_lines(100))
    metrics = read(path)
    assert metrics.evaluations.names == [
        "held_out_loss",
        "held_out_sources/code",
        "held_out_sources/web",
    ]
    breakdown = [name for name in metrics.steps.names if name.startswith("breakdown/")]
    assert len(breakdown) == 6
    assert not np.isnan(metrics.steps.reduced().series["breakdown/forward_seconds"].mean).any()


@pytest.mark.parametrize("value", [7, "x", [1], None, {"a": "x"}, {"a": {"b": 1}}])
def test_a_breakdown_of_another_form_is_none(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(1, breakdown=value), step_line(2, breakdown={"b": 1.0})])
    series = read(path).steps.reduced().series
    np.testing.assert_array_equal(series["breakdown/b"].mean, [np.nan, 1.0])
    if "breakdown/a" in series:
        assert np.isnan(series["breakdown/a"].mean).all()


def test_so_many_entries_at_most(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [step_line(n + 1, breakdown={f"term {n}": 1.0}) for n in range(200)]
    write_lines(path, lines)
    names = [name for name in read(path).steps.names if name.startswith("breakdown/")]
    assert len(names) == 64


def test_the_best_evaluation_is_the_lowest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [evaluation_line(step, loss) for step, loss in ((5, 3.0), (10, 2.0), (15, 2.5))]
    write_lines(path, lines)
    best = read(path).best
    assert best is not None
    assert best["step"] == 10


def test_a_file_that_grows_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(1)])
    metrics = MetricsFile(path)
    assert metrics.read()
    assert not metrics.read()
    with path.open("a") as file:
        file.write(json.dumps(step_line(2)) + "\n" + json.dumps(step_line(3))[:30])
    assert metrics.read()
    assert steps_of(metrics) == [1, 2]
    with path.open("a") as file:
        file.write(json.dumps(step_line(3))[30:] + "\n")
    assert metrics.read()
    assert steps_of(metrics) == [1, 2, 3]
    assert (metrics.version, metrics.unreadable.count) == (0, 0)


@pytest.mark.parametrize("way", ["roll back", "cut and grown", "resume"])
def test_steps_that_were_taken_back_go(tmp_path: Path, way: str) -> None:
    """Also where the file is longer again than before by the time it is looked at."""
    path = tmp_path / "metrics.jsonl"
    with writer(tmp_path) as run:
        for step in range(1, 21):
            run.log_step(step_metrics(step))
        metrics = MetricsFile(path)
        metrics.read()
        assert steps_of(metrics) == list(range(1, 21))
        if way == "roll back":
            run.roll_back(8, 8 * 16)
        elif way == "cut and grown":
            run.roll_back(8, 8 * 16)
            for step in range(9, 31):
                run.log_step(step_metrics(step, loss=3.25))
    if way == "resume":
        with writer(tmp_path, resume_step=12, resume_samples=12 * 16) as again:
            again.log_step(step_metrics(13, loss=3.25))
    assert metrics.read()
    assert metrics.version == 1
    last = {"roll back": 8, "cut and grown": 30, "resume": 13}[way]
    assert steps_of(metrics) == list(range(1, last + 1))
    assert metrics.unreadable.count == 0


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics.jsonl: cannot be read: No such file"):
        read(tmp_path / "metrics.jsonl")


LINES = st.lists(
    st.one_of(
        st.builds(lambda step: json.dumps(step_line(step)), st.integers(0, 40)),
        st.builds(lambda step: json.dumps(evaluation_line(step, 2.0)), st.integers(0, 40)),
        st.builds(lambda step: f'{{"step": {step}, "event": "skipped"}}', st.integers(0, 40)),
        st.sampled_from(["", "{}", "[", "{", "null", '{"step": 3, "loss": null', "\r", "é"]),
    ),
    max_size=40,
)


@given(lines=LINES, block_bytes=st.sampled_from([1, 200, 1 << 20]))
@settings(max_examples=examples(200))
def test_a_block_is_read_as_its_lines_are(
    lines: list[str], block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the lines are, and wherever a block ends: compared with a plain reading."""
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_file, "_BLOCK_BYTES", block_bytes)
        metrics = read(path)
    expected_steps: list[int] = []
    unreadable = evaluated = events = 0
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            unreadable += bool(line.strip())
            continue
        if not isinstance(value, dict) or "step" not in value:
            unreadable += 1
        elif "event" in value:
            events += 1
        elif "loss" in value:
            later = value["step"] > max(expected_steps, default=0)
            unreadable += not later
            expected_steps += [value["step"]] * later
        else:
            later = value["step"] > evaluated
            unreadable += not later
            evaluated = max(evaluated, value["step"])
    assert steps_of(metrics) == expected_steps
    assert metrics.events.count("skipped") == events
    assert metrics.unreadable.count == unreadable


def test_tasks_and_bits_per_byte_are_series_of_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [
        {"step": 2, "held_out_loss": 2.0, "held_out_bits_per_byte": 1.5},
        {"step": 3, "tasks": {"arc_easy/acc": 0.25}},
        {"step": 4, "held_out_loss": 1.0, "tasks": {"arc_easy/acc": 0.5}},
    ]
    write_lines(path, lines)
    metrics = read(path)
    series = metrics.evaluations.reduced().series
    np.testing.assert_array_equal(series["tasks/arc_easy/acc"].mean, [np.nan, 0.25, 0.5])
    np.testing.assert_array_equal(series["held_out_loss"].mean, [2.0, np.nan, 1.0])
    np.testing.assert_array_equal(series["held_out_bits_per_byte"].mean, [1.5, np.nan, np.nan])
    assert metrics.best == lines[2]
