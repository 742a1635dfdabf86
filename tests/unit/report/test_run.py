"""Run directories become runs with names that differ, and what is no run is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.errors import DataError
from bigtrain.report import run_files
from bigtrain.report.run_files import Prediction, open_runs, read_run_files
from bigtrain.run.health.fencing import acquire
from bigtrain.run.run_directory import note_start
from tests.support.run_directories import eventful_run, make_run, step_line


@pytest.mark.parametrize(
    ("directories", "names"),
    [
        (["a"], ["a"]),
        (["x/a", "x/b"], ["a", "b"]),
        (["x/a", "y/a"], ["x/a", "y/a"]),
        (["x/1/run", "x/2/run", "y/1/run"], ["x/1/run", "x/2/run", "y/1/run"]),
    ],
)
def test_names_are_short_and_differ(
    tmp_path: Path, directories: list[str], names: list[str]
) -> None:
    places = [make_run(tmp_path / name, [step_line(1)]) for name in directories]
    assert [run.name for run in open_runs(places)] == names


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ({"directory": "runs/mine/run"}, "runs/mine/run"),
        ({"directory": "/data/runs/run/"}, "/data/runs/run"),
        ({"directory": "runs/before_it_was_moved"}, "run"),
        ({"directory": 3}, "run"),
        ("none", "run"),
    ],
)
def test_the_only_run_has_the_name_that_its_user_set(
    tmp_path: Path, output: object, name: str
) -> None:
    [run] = open_runs([make_run(tmp_path / "run", [step_line(1)], config={"output": output})])
    assert run.name == name


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, words in (
        (tmp_path / "none", "/none: no such directory -> name a run's output.directory"),
        (tmp_path / "file", "file: is not a directory -> name a run's"),
        (tmp_path, r"has no metrics\.jsonl, so it is not a run, or has"),
    ):
        with pytest.raises(DataError, match=words):
            open_runs([place])


def test_the_same_run_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(DataError, match="the same run is named twice -> remove one of them"):
        open_runs([run, run])
    with pytest.raises(DataError) as error:
        open_runs([run, tmp_path / "link"])
    assert f"link, which is {run}: the same run is named twice" in str(error.value)


def test_many_runs_have_fewer_points_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_BUCKETS", "_MIN_BUCKETS"):
        monkeypatch.setattr(run_files, name, getattr(run_files, name) // 8)
    places = [
        make_run(tmp_path / str(n), [step_line(step) for step in range(1, 1125)]) for n in range(9)
    ]
    assert {run.metrics.steps.width for run in open_runs(places[:2])} == {1}
    assert {run.metrics.steps.width for run in open_runs(places)} == {4}


def test_starts_are_those_that_a_run_writes(tmp_path: Path) -> None:
    for step in (0, 125):
        token = acquire(tmp_path, {"SLURM_JOB_ID": "77"} if step else {})
        note_start(
            tmp_path,
            generation=token.holder.generation,
            step=step,
            samples=8 * step,
            world_size=4,
        )
    first, second = read_run_files(tmp_path).starts
    assert (first.generation, first.step, first.slurm_job_id) == (1, 0, None)
    assert (second.generation, second.step, second.slurm_job_id) == (2, 125, "77")
    assert second.samples == 1000
    assert second.world_size == 4
    assert second.since.endswith("UTC")


def test_all_files_of_an_eventful_run(tmp_path: Path) -> None:
    files = read_run_files(eventful_run(tmp_path / "run"))
    assert files.notes == []
    assert [start.step for start in files.starts] == [0, 200, 450]
    [hang] = files.hangs
    assert hang.step == 247
    assert "rank 11 on node1" in hang.text
    assert files.prediction is not None
    assert files.prediction.peak_memory_gib == 63.2


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 9999])
def test_corrupt_files_are_notes(tmp_path: Path, content: bytes) -> None:
    run = eventful_run(tmp_path / "run")
    for path in [*run.glob("*.json"), run / "starts.jsonl", *run.glob("generations/*")]:
        path.write_bytes(content)
    files = read_run_files(run)
    assert (files.config, files.environment, files.prediction) == (None, None, None)
    # Four files and three generations.
    assert len(files.notes) == 7
    assert any(note.startswith("config.json ") for note in files.notes)
    assert [start.step for start in files.starts] == [None, None, None]


def test_absent_files_are_notes_but_for_the_prediction(tmp_path: Path) -> None:
    assert read_run_files(tmp_path).notes == [
        "config.json is missing.",
        "deepspeed.json is missing.",
        "environment.json is missing.",
    ]


@pytest.mark.parametrize("bad", [None, "1", -1, [1], {"a": 1}, True, 10**400, float("nan")])
def test_a_prediction_of_another_form_says_nothing(tmp_path: Path, bad: object) -> None:
    values = {"step_seconds": bad, "terms": {"a": bad, "b": 2}, "memory_terms": bad}
    run = make_run(tmp_path / "run", [], prediction=values)
    expected = {"a": 1.0} if isinstance(bad, dict) else {}
    assert read_run_files(run).prediction == Prediction(terms={"b": 2.0}, memory_terms=expected)
