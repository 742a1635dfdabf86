"""The command that fits constants, and the table of rows that were held out of a fit."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from bigtrain.planner.published.evaluation import predict, read_rows
from bigtrain.planner.tables.hardware import find_device
from tests.support.worlds import ROOT
from tools import planner_fit
from tools.planner_fit import HELD_OUT, LEFT_OUT, ROWS, Tables, errors_of, in_force, left_out, split


def few_rows(path: Path) -> Path:
    """A file with one published row of each source."""
    with ROWS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    firsts = {row["source"]: row for row in reversed(rows)}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(firsts.values())
    return path


def test_it_runs_and_leaves_the_tables_in_force_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = find_device("A100")
    planner_fit.main(
        ["--rows", str(few_rows(tmp_path / "rows.csv")), "--held-out", "--rounds", "1"]
    )
    printed = capsys.readouterr().out
    assert "reach/A100.matmul = " in printed
    assert "| all | " in printed
    assert find_device("A100") == before


def test_a_fit_brings_predictions_nearer(tmp_path: Path) -> None:
    rows = read_rows(few_rows(tmp_path / "rows.csv"))
    tables = Tables(from_middle=True)
    with in_force(tables):
        before = planner_fit.residuals(tables, rows, tables.start)
        after = planner_fit.residuals(tables, rows, planner_fit.fit(tables, rows, 2))
    assert (after**2).sum() < 0.5 * (before**2).sum()


def test_table_of_the_docs_is_that_of_the_constants_that_were_fitted_without_its_rows() -> None:
    tables = Tables()
    _, judged = split(read_rows(ROWS))
    known = [predict(row) for row in judged[:3]]
    with in_force(tables):
        tables.load_constants(json.loads(HELD_OUT.read_text()))
        assert [predict(row) for row in judged[:3]] != known
        assert errors_of(judged) in (ROOT / "docs" / "planner.md").read_text()


@pytest.mark.slow
def test_table_of_sources_is_that_of_constants_that_were_fitted_without_each() -> None:
    table = left_out(json.loads(LEFT_OUT.read_text()))
    assert table in (ROOT / "docs" / "planner.md").read_text()
